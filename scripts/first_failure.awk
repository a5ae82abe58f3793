# Prints the first failure of a run as one line, from the log of its ranks and launcher (srun, mpirun, horovodrun):
#   awk -v hosts='a100-01 a100-01 a100-02 a100-02' -f scripts/first_failure.awk LOG
# hosts: the host of each rank, for launchers that do not name it. Later failures follow from the first.

function host_of(rank) { return rank + 1 in host ? host[rank + 1] : "" }
# Records a rank that ended: where, and how according to the launcher.
function note(rank, where, how) { ends++; end_rank[ends] = rank; end_place[ends] = place(rank, where); end_how[ends] = how }
function exit_code(code) {
  return "exit code " code (code == 255 ? " of ssh: killed by a signal, or the connection broke" : "")
}
function place(rank, where) { return "rank" (rank ~ /[^0-9]/ ? "s " : " ") rank (where == "" ? "" : " on " where) }

BEGIN { split(hosts, host, " ") }

{
  sub(/\r$/, "")
  marked = ""
  if (match($0, /^\[[0-9]+(,[0-9]+)?\]<std(out|err)>:/)) { # horovodrun's mark: [RANK] or [JOB,RANK]
    marked = substr($0, 2, index($0, "]") - 2)
    sub(/.*,/, "", marked)
    # mpirun marks each write, and Python writes the traceback of a missing module in several pieces.
    gsub(/\[[0-9]+(,[0-9]+)?\]<std(out|err)>:/, "")
  }
}

# Of ranks whose launcher ended before them, perhaps because of the failure.
/^hvd_bert: the launcher was killed/ { killed = substr($0, 11); next }

# A user error.
/^hvd_bert: / && user_error == "" { user_error = substr($0, 11) }

# The trainer's message about a rank: a traceback, whose last exception counts, or that it lost another rank.
/^rank [0-9]+ on [^ ]+ failed:$/ && raised == "" { failing[marked] = substr($0, 1, length($0) - 8) }
/^rank [0-9]+ on [^ ]+ lost another rank/ {
  lost[$2]
  if (noticed == "") noticed = $0
}
/^[A-Za-z_.]*(Error|Exception|Interrupt)(:|$)/ && !/Horovod detected that one or more/ { # except horovodrun's own
  if (marked in failing) {
    if (raised == "") { raised = failing[marked] ": " $0; raised_by = marked }
  } else if (exception == "") {
    exception = $0
  }
}
/^(During handling of the above|The above exception was the)/ && raised_by == marked { raised = "" }

# A rank that timed out waiting for others. It names them.
/^rank [0-9]+ on [^ ]+ has waited [0-9]+ s for/ && waited == "" {
  waited = $0
  sub(/\. Check the file systems.*/, "", waited)
}

# The launcher's message about a rank that could print nothing itself.
/^srun: error: .*: tasks? [0-9]/ {
  split($0, part, ": ")
  sub(/tasks? /, "", part[4])
  note(part[4], part[3], part[5])
}
/noticed that process rank [0-9]+ .* on node .* exited on/ {
  rank = where = how = $0
  sub(/.*process rank /, "", rank); sub(/ .*/, "", rank)
  sub(/.* on node /, "", where); sub(/ .*/, "", where)
  sub(/.* exited on /, "", how); sub(/\.$/, "", how)
  note(rank, where, how)
}
/^Process [0-9]+ exit with status code [0-9]+/ { note($2, host_of($2), exit_code($NF + 0)) }
/^ *Process name: / {
  named = $0
  sub(/\]$/, "", named) # mpirun's is [[JOB,1],RANK]
  sub(/.*[^0-9]/, "", named)
}
/^ *Exit code: / && named != "" { note(named, host_of(named), exit_code($NF)) }

END {
  if (user_error != "") print user_error
  else if (raised != "") print raised
  else if (waited != "") print waited
  else if (ends) {
    first = 1
    for (i = ends; i > 0; i--) if (!(end_rank[i] in lost)) first = i
    print end_place[first] ": " (exception == "" ? end_how[first] : exception)
  }
  else if (exception != "") print exception
  else if (killed != "") print killed
  else if (noticed != "") print noticed
}

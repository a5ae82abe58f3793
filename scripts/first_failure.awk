# What failed first in a run, from the log of its ranks and its launcher (srun, mpirun, horovodrun), as one line:
#   awk -v hosts='a100-01 a100-01 a100-02 a100-02' -f scripts/first_failure.awk LOG
# hosts: that of each rank in turn, for launchers that name none. Later failures are of ranks that were ended for the first.

function host_of(rank) { return rank + 1 in host ? host[rank + 1] : "" }
# A rank that ended: where, and how by the launcher's account.
function note(rank, where, how) { ends++; end_rank[ends] = rank; end_place[ends] = place(rank, where); end_how[ends] = how }
function exit_code(code) {
  return "exit code " code (code == 255 ? ", which is ssh's: ended by a signal, or the connection broke" : "")
}
function place(rank, where) { return "rank" (rank ~ /[^0-9]/ ? "s " : " ") rank (where == "" ? "" : " on " where) }

BEGIN { split(hosts, host, " ") }

{
  sub(/\r$/, "")
  marked = ""
  if (match($0, /^\[[0-9]+(,[0-9]+)?\]<std(out|err)>:/)) { # horovodrun's mark: [RANK] or [JOB,RANK]
    marked = substr($0, 2, index($0, "]") - 2)
    sub(/.*,/, "", marked)
    # mpirun marks each piece that is written, and Python writes the traceback of a module that is missing in pieces.
    gsub(/\[[0-9]+(,[0-9]+)?\]<std(out|err)>:/, "")
  }
}

# A mistake of the user, with the place where it matters.
/^hvd_bert: / && said == "" { said = substr($0, 11) }

# The trainer's own word on a rank: its traceback, whose last exception counts; or that it lost another rank.
/^rank [0-9]+ on [^ ]+ failed:$/ && raised == "" { failing[marked] = substr($0, 1, length($0) - 8) }
/^rank [0-9]+ on [^ ]+ lost another rank/ {
  lost[$2]
  if (noticed == "") noticed = $0
}
/^[A-Za-z_.]*(Error|Exception|Interrupt)(:|$)/ && !/Horovod detected that one or more/ { # which is horovodrun's own
  if (marked in failing) {
    if (raised == "") { raised = failing[marked] ": " $0; raised_by = marked }
  } else if (exception == "") {
    exception = $0
  }
}
/^(During handling of the above|The above exception was the)/ && raised_by == marked { raised = "" }

# A rank that has waited too long for others, which it names.
/^rank [0-9]+ on [^ ]+ has waited [0-9]+ s for/ && waited == "" {
  waited = $0
  sub(/\. Check the file systems.*/, "", waited)
}

# The launcher's word on a rank that could say nothing itself.
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
  if (said != "") print said
  else if (raised != "") print raised
  else if (waited != "") print waited
  else if (ends) {
    first = 1
    for (i = ends; i > 0; i--) if (!(end_rank[i] in lost)) first = i
    print end_place[first] ": " (exception == "" ? end_how[first] : exception)
  }
  else if (exception != "") print exception
  else if (noticed != "") print noticed
}

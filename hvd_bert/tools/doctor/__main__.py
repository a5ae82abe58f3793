"""Preflight check: find problems of hosts, ranks and network before a training starts.

    hvd-bert doctor                                                this host
    hvd-bert doctor --hosts a100-01:2,a100-02:2                    hosts without Slurm, over ssh (hosts.py)
    horovodrun -np 4 -H a100-01:2,a100-02:2 hvd-bert doctor        hosts, ranks and network of a run
    srun --mpi=pmix hvd-bert doctor                                hosts, ranks and network in a Slurm job
    horovodrun -np 4 hvd-bert doctor --prove                       proof that 4 ranks do the work of one process
    hvd-bert doctor --log FILE                                     first failure of a run

Exit status: 0 if a training would start, else 2 (docs/guides/preflight-check.md). With --prove: 0, or 1 if the proof
fails. With --log: 0, with or without a failure in the log.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import json
import os
import platform
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_bert.config.parser import HELP, MAX_SECONDS, Limits, Parser, add_number
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.distributed.launch import find_launcher, other_sizes, speaks_first
from hvd_bert.errors import EXIT_OK, UserError, find_user_error, visible
from hvd_bert.startup import collector_paused, print_on_one_rank, run_command, start_rank, take_local_rank
from hvd_bert.storage.reading import read_text
from hvd_bert.streams import end_when_lost, keep_running
from hvd_bert.tools.doctor.lines import Report, failure
from hvd_bert.tools.runs.failure import first_failure, read_lines
from hvd_bert.tools.runs.launching import host_slots

if TYPE_CHECKING:
    from hvd_bert.config.settings import Config
    from hvd_bert.distributed.world import World

BERT_BASE_MB, PROOF_STEPS = 435.6, 5
NOT_PROVED = ("evaluation", "checkpoints", "profiling", "output")  # groups of flags that --prove refuses


def make_parser() -> Parser:
    """Make the parser of the command's flags."""
    parser = Parser(prog="hvd-bert doctor")
    parser.description = "Check hosts, ranks and network before a training, and print how to fix each problem."
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text. (default: False)")
    parser.add_argument("--verbose", action="store_true", help="Print all checks, not only a summary. (default: False)")
    size = "Megabytes of the measured allreduce. (default: BERT-base's gradients in fp32, %(default)s)"
    add_number(parser, "--size", BERT_BASE_MB, size, Limits(above=0, maximum=100_000), "MB")
    output = "Folder that a run would write to. (default: %(default)s)"
    parser.add_argument("--output_dir", metavar="FOLDER", type=Path, default=Path("runs"), help=output)
    _add_hosts(parser)
    add_number(parser, "--slots", 1, "Ranks on this host, for the check of its memory.", Limits(minimum=1))
    timeout = "Maximum seconds per step of the check. (default: %(default)g)"
    add_number(parser, "--timeout", 180.0, timeout, Limits(above=0, maximum=MAX_SECONDS), "S")
    modes = parser.add_mutually_exclusive_group()
    prove = "In place of the checks, train a few steps and compare each with the same step in one process. Takes the"
    prove += " training's flags, except flags of length and outputs, and of features that cannot be compared. (default:"
    prove += " False)"
    modes.add_argument("--prove", action="store_true", help=prove)
    log = "In place of the checks, print the first failure in the log of a run, with its rank and host. (default: none)"
    modes.add_argument("--log", metavar="FILE", type=Path, help=log)
    return parser


def _add_hosts(parser: Parser) -> None:
    """Add the flags for hosts and ssh."""
    hosts = parser.add_mutually_exclusive_group()
    named = "Check these hosts over ssh, and print the horovodrun line that starts a training; with --log: hosts of the"
    named += " run. (default: this host)"
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help=named)
    hostfile = "File of the hosts, with lines of `a100-01:2` or `a100-01 slots=2`. (default: none)"
    hosts.add_argument("--hostfile", metavar="FILE", type=Path, help=hostfile)
    port, limits = "Port of ssh on the hosts. (default: ssh's)", Limits(minimum=1, maximum=65535)
    parser.add_argument("--ssh_port", "--ssh-port", metavar="N", type=int, limits=limits, help=port)
    key = "Private key for ssh. (default: ssh's)"
    parser.add_argument("--ssh_identity_file", "--ssh-identity-file", metavar="FILE", type=Path, help=key)


def slots_by(flags: argparse.Namespace) -> dict[str, int]:
    """Read the number of slots per host from --hosts or --hostfile; empty without these flags. Raises UserError."""
    if flags.hostfile:
        return read_hostfile(flags.hostfile)
    return host_slots(flags.hosts) if flags.hosts else {}


def read_hostfile(path: Path) -> dict[str, int]:
    """Read the number of slots per host from lines of `a100-01 slots=2` or `a100-01:2`. Raises UserError."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--hostfile {path} cannot be read: {error}") from None
    lines = (re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in text.splitlines())
    hosts = ",".join(line for line in lines if line)
    if not hosts:
        raise UserError(f"--hostfile {path} has no hosts. Write lines such as a100-01:2.")
    return host_slots(hosts, f"--hostfile {path}")


def parse_proof(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Parse the command line of --prove into the command's own flags and the trainer's settings. Raises UserError."""
    from hvd_bert.config import command_line, settings  # imports yaml, which may be missing
    from hvd_bert.tools.runs.trainer_flags import names_data

    parser = make_parser()
    flags, rest = parser.parse_known_args(argv)
    if flags.hosts or flags.hostfile:
        raise UserError("--prove trains on the ranks of a launcher: start it with horovodrun in place of --hosts.")
    fixed = [f"--max_steps={PROOF_STEPS}", "--num_train_epochs=1", "--do_train", "--no_do_eval", "--eval_strategy=no"]
    fixed += ["--save_steps=0", "--report_to=none", "--logging_steps=1", "--elastic=False", "--requeue=no"]
    refused = command_line.given_flags(fixed) | {n for n, flag in settings.FLAGS.items() if flag.group in NOT_PROVED}
    given = {word for word in command_line.flag_names(rest) if refused & command_line.given_flags([f"--{word}"])}
    own = vars(flags).keys() - {"prove", "json", "verbose"}
    given |= {name for name in own if getattr(flags, name) != parser.get_default(name)}
    if given:
        names = ", ".join(f"--{name}" for name in sorted(given))
        raise UserError(f"--prove trains {PROOF_STEPS} steps, checks no host and keeps no output: omit {names}.")
    words = rest if names_data(rest) else ["--config=sample", "--dropout=0.1", *rest]
    config = command_line.parse(command_line.override_argv(words, fixed))
    args = replace(config.train, output_dir=None)  # a --config file may set a folder, but the proof keeps no output
    args.refuse_auto("hvd-bert doctor --prove")
    on_several = " or ".join(name for name, row in STRATEGIES.items() if row.several_gpus)
    differs = args.fp16 or args.torch_compile or args.optim != "adamw_torch_fused"
    if differs or STRATEGIES[config.parallel.strategy].several_gpus:
        others = "--fp16, --torch_compile and --optim"
        raise UserError(f"--prove cannot compare --strategy {on_several}, {others}. Omit these flags.")
    return flags, replace(config, train=args)


def prove(world: World) -> None:
    """Run the proof of --prove (prove.py). Called by all ranks."""
    with world.raise_on_all_ranks():
        flags, config = parse_proof(sys.argv[1:])
    with collector_paused():
        from hvd_bert.tools.doctor import prove
    prove.run(flags, config, world)


def show_first_failure(flags: argparse.Namespace) -> None:
    """Print the first failure in the log of --log. Raises UserError."""
    hosts = [host for host, slots in slots_by(flags).items() for _ in range(slots)]
    try:
        found = visible(first_failure(read_lines(flags.log), hosts))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--log {flags.log}: cannot be read: {reason}. Give a file with a launcher's output.") from None
    if flags.json:
        print(json.dumps({"first_failure": found or None}))
    else:
        print(f"First failure: {found}" if found else f"No failure found in {flags.log}.")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    print_on_one_rank(sys.argv[1:] if argv is None else argv)
    return run_command(partial(_check, argv))


def _check(argv: list[str] | None) -> int:
    launcher, first = find_launcher(os.environ), speaks_first(os.environ)
    flags = make_parser().parse_args(argv)
    if flags.log:
        if first:
            show_first_failure(flags)
        return EXIT_OK
    slots = slots_by(flags)
    if slots and not launcher.is_alone:
        raise UserError(f"--hosts: start the check once, not in each process of {launcher.name}.")
    keep_running()  # callers need the exit status, even if the output is lost
    report = Report(flags.json, first, flags.verbose)
    unused = [f"{name}={value}" for name, value in other_sizes(launcher, os.environ).items()]
    report.data |= {"host": platform.node(), "launcher": launcher.name, "launched": launcher.size, "ignored": unused}
    started = f"1 of {launcher.size} ranks by {launcher.name}" if launcher.size else f"launcher: {launcher.name}"
    started += f"; ignored: {', '.join(unused)}" if unused else ""
    report.print_details(f"hvd_bert doctor on {platform.node()} ({started})\n")
    try:
        with collector_paused():
            from hvd_bert.tools.doctor import diagnosis, hosts
    except ImportError as error:
        report.add(failure("Packages", str(find_user_error(error) or error)))
        return report.close()
    return hosts.check_hosts(slots, flags, report) if slots else diagnosis.diagnose(flags, launcher, report)


if __name__ == "__main__":
    if "--prove" in sys.argv and not HELP & set(sys.argv):
        start_rank(prove, lambda argv: parse_proof(argv)[1])
    end_when_lost()
    take_local_rank()
    sys.exit(main())

"""The command line: ``dpx``, and ``python -m lightning_dpx``."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any

from lightning_dpx.command_start import imports_are_done
from lightning_dpx.commands import bench, doctor, plan, train, tune
from lightning_dpx.commands.output import flush, flushed_help, lost_output
from lightning_dpx.commands.progress import done
from lightning_dpx.commands.usage import DOES_NOT_FIT, ERROR, UnreadableArguments, reading_arguments, warnings_in_words
from lightning_dpx.errors import DPXError, UnsupportedError
from lightning_dpx.lightning.lightning_api import MisconfigurationException

_SHELLS = ("bash", "zsh", "tcsh")
_ALIKE = 0.8  # of two names, one of which is misspelt
_OWN_OPTIONS = (["plan"], ["tune"])  # commands that read some arguments themselves, and leave others to a LightningCLI
_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
_NO_READER = 141  # what they say of one that wrote to a pipe whose reader has ended
_COMPLETION = 'print a completion script; in ~/.bashrc: eval "$(dpx --print-completion bash)"'


class _PrintCompletion(argparse.Action):
    """Prints a script of a shell, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: object, shell: Any, _option: object = None) -> None:
        try:
            # Only where it is asked for: the extra for the command line brings it.
            import shtab
        except ImportError as error:
            raise UnsupportedError("Completion needs shtab; pip install 'lightning-dpx[cli]'.") from error
        print(shtab.complete(parser, shell))
        # Before the parser finds that no command was named.
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` (or the process's own) name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="dpx",
        description="One process drives all your devices.",
        epilog="Exit status 0: done; 1: an error, also of arguments or a config that cannot be read; 2, of plan and "
        "tune only: it does not fit; 130: Ctrl-C; 141: what reads the output has ended.",
    )
    parser.add_argument("--print-completion", action=_PrintCompletion, choices=_SHELLS, help=_COMPLETION)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (train, plan, tune, bench, doctor):
        command.add_to(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        imports_are_done()
        # `dpx fit` and the others that take more hand the rest to a LightningCLI.
        with flushed_help(), reading_arguments():
            args, others = parser.parse_known_args(given)
            if others and not args.takes_more:
                parser.error(f"unrecognized arguments: {' '.join(others)}")
        with warnings_in_words():
            status = int(args.run(args, others))
        flush()
        return status
    except OSError:
        problem = lost_output()
        if problem is None:
            raise
        return _without_output(problem)
    except KeyboardInterrupt:
        return _interrupted()
    except UnreadableArguments:
        if given[:1] in _OWN_OPTIONS:
            _suggest(given, commands.choices[given[0]])
        return ERROR
    except SystemExit as end:
        # A Trainer catches Ctrl-C itself, and ends the program with the status of an error.
        if _is_because_of(end, KeyboardInterrupt):
            return _interrupted()
        # Rich, which prints summaries, catches this itself, and has nothing written any more.
        if _is_because_of(end, BrokenPipeError):
            return _NO_READER
        # Of the user's own code: of these commands this status says "does not fit".
        if end.code == DOES_NOT_FIT and given[:1] in _OWN_OPTIONS:
            return ERROR
        raise
    except MisconfigurationException as error:
        # Of Lightning, such as a module without a loader or an accelerator that is not there.
        done()
        print(f"dpx: {error}", file=sys.stderr)
        return ERROR
    except DPXError as error:
        done()
        # What was noted on the error, such as where it happened, would be lost with the traceback.
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"dpx: {error}{notes}", file=sys.stderr)
        return ERROR


def _suggest(given: Sequence[str], command: argparse.ArgumentParser) -> None:
    """Names the option that was meant: what the command does not know was read by the parser of ``fit``."""
    known = re.findall(r"--[\w-]+", command.format_usage())
    for argument in given:
        name = argument.partition("=")[0]
        meant = difflib.get_close_matches(name, known, 1, _ALIKE)
        if name.startswith("--") and name not in known and meant:
            print(f"dpx {given[0]}: did you mean {meant[0]}? dpx {given[0]} --help shows all options.", file=sys.stderr)


def _without_output(problem: OSError) -> int:
    """Nothing more can be said on standard output; the exit status."""
    done()
    # `dpx plan ... | head` has seen all that it wanted.
    if isinstance(problem, BrokenPipeError):
        return _NO_READER
    print(f"dpx: standard output cannot be written: {problem.strerror or problem}", file=sys.stderr)
    return ERROR


def _interrupted() -> int:
    """Leaves a clean line to what the terminal shows next; the exit status."""
    done()
    print("dpx: interrupted", file=sys.stderr)
    return _INTERRUPTED


def _is_because_of(end: BaseException, kind: type[BaseException]) -> bool:
    """Whether a program is ended because of Ctrl-C or an error of this ``kind``, perhaps by way of other errors."""
    cause: BaseException | None = end
    while cause is not None:
        if isinstance(cause, kind):
            return True
        cause = cause.__cause__ or cause.__context__
    return False

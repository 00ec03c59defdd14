"""`edge-client`: the command line."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from outrider.common.config.loader import with_values
from outrider.common.errors import EXIT_SIGNALLED, OutriderError
from outrider.common.printable import one_line
from outrider.common.process.extras import needs_extra
from outrider.common.process.outputs import replace_closed_outputs, tell_failed_write
from outrider.edge_client.commands import datastore, learned
from outrider.edge_client.commands.json_output import JsonOutput
from outrider.edge_client.commands.parser import VERBS, import_verb, make_parser
from outrider.edge_client.config.flags import grammar_texts, load_run_config


class _Terminated(BaseException):
    """Raised where SIGTERM arrives."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, one of `outrider.common.errors`, or 130 after Ctrl-C. With `--json`, what
    ends a command early is printed as an object too, also SIGTERM (143)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    output = JsonOutput() if "--json" in arguments else None  # shorter, it could be --json-schema
    replace_closed_outputs()
    try:
        with _raising_terminated() if output is not None else contextlib.nullcontext():
            namespace = make_parser(arguments).parse_args(arguments)
            verb = VERBS.get(namespace.verb)
            with needs_extra(verb.extra if verb else "edge", namespace.verb):
                status = _dispatch(namespace, output)
        sys.stdout.flush()  # where what cannot be written is still told
        return status
    except OutriderError as error:
        print(f"edge-client: {one_line(str(error))}", file=sys.stderr)
        _report(output, str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return _signalled(output, "interrupted", signal.SIGINT)
    except _Terminated:
        return _signalled(output, "terminated", signal.SIGTERM)
    except OSError as error:
        failed = tell_failed_write(error, "edge-client")
        if failed is None:
            _report(output, repr(error), 1)
            raise
        return failed
    except SystemExit as stop:  # of the parser, after --help too
        if stop.code:
            _report(output, str(stop.__cause__), 2)
        raise
    except Exception as error:  # a bug, whose trace follows
        _report(output, repr(error), 1)
        raise


@contextlib.contextmanager
def _raising_terminated() -> Iterator[None]:
    """Raises `_Terminated` at the first SIGTERM. Only the main thread is told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _signalled(output: JsonOutput | None, error: str, number: int) -> int:
    _report(output, error, EXIT_SIGNALLED + number)
    return EXIT_SIGNALLED + number


def _report(output: JsonOutput | None, error: str, exit_code: int) -> None:
    if output is not None:
        output.print({"exact": None, "error": error, "exit_code": exit_code})


def _dispatch(namespace: argparse.Namespace, output: JsonOutput | None) -> int:
    if namespace.verb in VERBS:
        status: int = import_verb(namespace.verb).main(namespace)
        return status
    if namespace.verb == "draft":
        if namespace.draft_verb == "datastore":
            return datastore.main(namespace)
        if namespace.draft_verb == "learned":
            return learned.main(namespace)
        from outrider.edge_client.commands.export import main as export

        return export(namespace)
    texts = grammar_texts(namespace) if namespace.verb == "run" else {}
    loaded = load_run_config(namespace)
    if namespace.verb == "config":
        print("\n".join(map(one_line, loaded.lines(with_origins=namespace.origin))))
        return 0
    from outrider.common.process.tracing import exporting_spans
    from outrider.edge_client.commands.run import run

    output = output if namespace.json else None  # of a prompt "--json" there is none
    with exporting_spans(loaded.value.logs.otlp_endpoint, "edge-client"):
        config = with_values(loaded.value, **texts)
        return run(config, namespace.prompt, namespace.prompt_file, output, namespace.live)


if __name__ == "__main__":
    sys.exit(main())

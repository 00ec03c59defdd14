"""`edge-client`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outrider.common.errors import OutriderError
from outrider.common.printable import one_line
from outrider.common.process.extras import needs_extra
from outrider.edge_client.commands.parser import VERBS, import_verb, make_parser
from outrider.edge_client.config.flags import load_run_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, one of `outrider.common.errors`, or 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        namespace = make_parser(arguments).parse_args(arguments)
        verb = VERBS.get(namespace.verb)
        with needs_extra(verb.extra if verb else "edge", namespace.verb):
            return _dispatch(namespace)
    except OutriderError as error:
        print(f"edge-client: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, and a message would fail as well
        return 141


def _dispatch(namespace: argparse.Namespace) -> int:
    if namespace.verb in VERBS:
        status: int = import_verb(namespace.verb).main(namespace)
        return status
    if namespace.verb == "draft":
        from outrider.edge_client.commands.export import main as export

        return export(namespace)
    loaded = load_run_config(namespace)
    if namespace.verb == "config":
        print("\n".join(map(one_line, loaded.lines(with_origins=namespace.origin))))
        return 0
    from outrider.common.process.tracing import exporting_spans
    from outrider.edge_client.commands.run import run

    with exporting_spans(loaded.value.logs.otlp_endpoint, "edge-client"):
        return run(loaded.value, namespace.prompt, namespace.prompt_file, namespace.json, namespace.live)


if __name__ == "__main__":
    sys.exit(main())

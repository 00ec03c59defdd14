"""`edge-client`: the command line. Each verb is a module of `commands`, imported when asked for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from outrider.common.config.arguments import VerbParser
from outrider.common.errors import OutriderError, UsageError
from outrider.common.process.version import own_version
from outrider.edge_client.config.flags import COLOUR_NOTE, CONFIG_NOTE, add_config, load_run_config

# Verbs with a module of their own, imported for that verb alone: `add_arguments(parser)`, `main(namespace)`.
_VERBS_ELSEWHERE = {
    "chat": ("outrider.edge_client.commands.chat", "talk with the model in the terminal"),
    "serve": ("outrider.edge_client.daemon.command", "answer OpenAI's HTTP interface on this machine"),
    "ps": ("outrider.edge_client.commands.ps", "list what a daemon is generating"),
    "doctor": ("outrider.edge_client.commands.doctor", "check draft, link and verifier, and say what to do"),
    "completion": ("outrider.edge_client.commands.completion", "print a shell's completion script"),
    "bench": (
        "outrider.experiments.bench",
        "compare modes over links: a YAML in, a folder of results out",
    ),
    "calibrate": (
        "outrider.edge_client.commands.calibrate",
        "set a gate's thresholds from text, and say what the gate saves and costs",
    ),
    "plan": (
        "outrider.edge_client.commands.plan",
        "say what a link and two models will give, and the draft length",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, one of `outrider.common.errors`, or 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _dispatch(_make_parser(arguments).parse_args(arguments))
    except OutriderError as error:
        print(f"edge-client: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output is gone: nothing to say, and nobody to say it to
        return 141


def _dispatch(namespace: argparse.Namespace) -> int:
    if namespace.verb == "draft":
        from outrider.edge_client.commands.export import main as prepare

        return prepare(namespace)
    if namespace.verb in _VERBS_ELSEWHERE:
        status: int = _module_of(namespace.verb).main(namespace)
        return status
    loaded = load_run_config(namespace)
    if namespace.verb == "config":
        print("\n".join(loaded.lines(with_origins=namespace.origin)))
        return 0
    from outrider.common.process.tracing import exporting_spans
    from outrider.edge_client.commands.run import run

    with exporting_spans(loaded.value.otlp_endpoint, "edge-client"):
        return run(loaded.value, namespace.prompt, namespace.prompt_file, namespace.json, namespace.live)


def _module_of(verb: str) -> ModuleType:
    module, _ = _VERBS_ELSEWHERE[verb]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "pip install 'outrider[bench]' has what it needs"
        raise UsageError(f"{verb}: there is no module {error.name} here; {hint}") from error


def _make_parser(arguments: Sequence[str] = (), *, is_whole: bool = False) -> argparse.ArgumentParser:
    """`arguments` say which verb's own are needed; the whole has those of every verb that is installed."""
    parser = VerbParser(
        prog="edge-client",
        description="Draft here, verify in the cloud: the text is the target's.",
        epilog="Exit status: 0 done, 1 failed, 2 used wrongly, 3 no link, 4 refused by the verifier, "
        "5 models that do not fit, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"edge-client {own_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_run(verbs.add_parser("run", help="continue a prompt", epilog=f"{COLOUR_NOTE} {CONFIG_NOTE}"))
    draft = verbs.add_parser("draft", help="prepare drafts").add_subparsers(
        dest="draft_verb", required=True, metavar="VERB"
    )
    export = draft.add_parser("export", help="turn a Hugging Face directory into an INT4 ONNX draft")
    export.add_argument("hf_dir", type=Path, metavar="HF_DIR", help="Llama, Qwen2 or Qwen3 in safetensors")
    export.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="is made if missing")
    export.add_argument("--max-context", type=int, metavar="N", help="shorten the context to N tokens")
    export.add_argument(
        "--first-layers",
        type=int,
        metavar="N",
        help="take only the model's first N layers, its norm and head",
    )
    export.add_argument(
        "--mc-dropout", action="store_true", help="write the variant that --gate-variance needs, too"
    )
    _add_dropout_numbers(export)
    add_dropout = draft.add_parser("add-dropout", help="write that variant for a draft exported without")
    add_dropout.add_argument("draft_dir", type=Path, metavar="DRAFT_DIR", help="an exported draft")
    _add_dropout_numbers(add_dropout)
    show = verbs.add_parser("config", help="show the configuration: config show [--origin]")
    show.add_argument("action", choices=("show",))
    show.add_argument("--origin", action="store_true", help="say where each value comes from")
    add_config(show, "show", has_serve=True)
    for verb, (_, summary) in _VERBS_ELSEWHERE.items():
        its_parser = verbs.add_parser(verb, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if arguments[:1] == [verb]:
            _module_of(verb).add_arguments(its_parser)
        elif is_whole:
            with contextlib.suppress(UsageError):  # a verb that is not installed completes by its name
                _module_of(verb).add_arguments(its_parser)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Every verb with its arguments: what a shell completes."""
    return _make_parser(is_whole=True)


def _add_dropout_numbers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mc-dropout-samples", type=int, metavar="N", help="masks a token (default: 8)")
    parser.add_argument("--mc-dropout-rate", type=float, metavar="R", help="share dropped (default: 0.1)")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; - reads standard input")
    run.add_argument("--prompt-file", type=Path, metavar="F", help="read the prompt from a file")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    run.add_argument(
        "--live",
        action="store_true",
        help="colour the text by where each token came from, above a line with round trip, draft length, "
        "acceptance, mode and speed; needs a terminal, and the live extra",
    )
    add_config(run, "[PROMPT]")


if __name__ == "__main__":
    sys.exit(main())

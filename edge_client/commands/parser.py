"""The parser of `edge-client`. A verb's own arguments are made by its module, imported for that verb alone."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from outrider.common.config.arguments import VerbParser
from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.process.version import own_version
from outrider.edge_client.commands import datastore, learned
from outrider.edge_client.commands.compare import add_arguments as add_compare_arguments
from outrider.edge_client.config.flags import COLOUR_NOTE, CONFIG_NOTE, add_config, add_grammar_files


class Verb(NamedTuple):
    """Names the module of a verb, which has `add_arguments(parser)` and `main(namespace)`, and the extra that
    installs what it imports."""

    module: str
    summary: str
    extra: str = "edge"


VERBS = {
    "chat": Verb("outrider.edge_client.commands.chat", "talk with the model in the terminal"),
    "serve": Verb(
        "outrider.edge_client.daemon.command", "answer OpenAI's HTTP interface on this machine", "daemon"
    ),
    "ps": Verb("outrider.edge_client.commands.ps", "list what a daemon is generating"),
    "doctor": Verb(
        "outrider.edge_client.commands.doctor", "check draft, link and verifier, and suggest fixes"
    ),
    "completion": Verb("outrider.edge_client.commands.completion", "print a shell's completion script"),
    "bench": Verb(
        "outrider.experiments.bench", "compare modes over links: a YAML in, a folder of results out", "bench"
    ),
    "calibrate": Verb(
        "outrider.edge_client.commands.calibrate",
        "set a gate's thresholds from text, and measure what the gate saves and costs",
    ),
    "plan": Verb(
        "outrider.edge_client.commands.plan", "predict speeds over a link, and the best draft length"
    ),
}


def import_verb(name: str) -> ModuleType:
    """Returns the module of one of `VERBS`. Raises `UsageError` where it needs an extra."""
    with needs_extra(VERBS[name].extra, name):
        return importlib.import_module(VERBS[name].module)


def make_parser(arguments: Sequence[str] = (), *, is_whole: bool = False) -> argparse.ArgumentParser:
    """Returns the parser. Of `VERBS`, only the first of `arguments` gets its own arguments; with `is_whole`
    every one that is installed does, for a shell to complete."""
    parser = VerbParser(
        prog="edge-client",
        description="Draft here, verify in the cloud: the text has the target's distribution.",
        epilog="Exit status: 0 done, 1 failed, 2 used wrongly, 3 no link, 4 refused by the verifier, "
        "5 models that do not fit, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"edge-client {own_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    summary = "continue a text as it is, without a chat template (`chat` applies it)"
    _add_run(verbs.add_parser("run", help=summary, epilog=f"{COLOUR_NOTE} {CONFIG_NOTE}"))
    _add_draft(verbs.add_parser("draft", help="prepare drafts"))
    show = verbs.add_parser("config", help="show the configuration: config show [--origin]")
    show.add_argument("action", choices=("show",))
    show.add_argument("--origin", action="store_true", help="show where each value comes from")
    add_config(show, "show", has_serve=True)
    for name, verb in VERBS.items():
        summary = verb.summary
        its_parser = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if arguments[:1] == [name]:
            import_verb(name).add_arguments(its_parser)
        elif is_whole:
            with contextlib.suppress(UsageError):  # a verb that is not installed completes by its name
                import_verb(name).add_arguments(its_parser)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; - reads standard input")
    run.add_argument("--prompt-file", type=Path, metavar="F", help="read the prompt from a file")
    run.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text, also of an error"
    )
    add_grammar_files(run)
    run.add_argument(
        "--live",
        action="store_true",
        help="colour the text by where each token came from, above a line with round trip, draft length, "
        "acceptance, mode and speed; needs a terminal, and the live extra",
    )
    add_config(run, "[PROMPT]")


def _add_draft(draft: argparse.ArgumentParser) -> None:
    verbs = draft.add_subparsers(dest="draft_verb", required=True, metavar="VERB")
    export = verbs.add_parser("export", help="turn a Hugging Face directory into an ONNX draft")
    export.add_argument(
        "hf_dir",
        type=Path,
        metavar="HF_DIR",
        help="Llama, Mistral, Qwen2, Qwen3, Gemma (1 to 3), Phi, Phi-3, GPT-NeoX or GPT-2 in safetensors",
    )
    export.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="directory to write; made if missing")
    export.add_argument("--max-context", type=int, metavar="N", help="shorten the context to N tokens")
    export.add_argument(
        "--first-layers",
        type=int,
        metavar="N",
        help="export only the model's first N layers, with its norm and head",
    )
    export.add_argument(
        "--precision",
        choices=("int4", "int8", "fp16", "auto"),
        default="auto",
        help="of the weights; auto, the default, is the smallest that loses at most 2 points of acceptance against the "
        "float model on text, and int4 above 250 M parameters",
    )
    export.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help='with --precision auto: text to compare on, UTF-8 or .jsonl with "text" or "prompt" on every line; '
        "default: held-out prompts beside the embedded draft",
    )
    export.add_argument(
        "--self-check",
        action="store_true",
        help="print the export's agreement and speed beside its source's in PyTorch (extra edge-torch)",
    )
    export.add_argument(
        "--mc-dropout", action="store_true", help="also write the variant that --gate-variance needs"
    )
    add_dropout = verbs.add_parser("add-dropout", help="write the --mc-dropout variant for an exported draft")
    add_dropout.add_argument("draft_dir", type=Path, metavar="DRAFT_DIR", help="an exported draft")
    datastore.add_arguments(verbs.add_parser("datastore", help="index texts for --draft-strategy retrieval"))
    learned.add_arguments(verbs.add_parser("learned", help="show or remove what --learn DIR has learned"))
    compare = verbs.add_parser("compare", help="measure drafts with a verifier, and recommend one")
    add_compare_arguments(compare)
    for parser in (export, add_dropout):
        parser.add_argument(
            "--mc-dropout-samples", type=int, metavar="N", help="masks for each token (default: 8)"
        )
        parser.add_argument(
            "--mc-dropout-rate",
            type=float,
            metavar="R",
            help="share of inputs that a mask drops (default: 0.1)",
        )

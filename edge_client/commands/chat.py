"""Runs `edge-client chat`: a conversation in the terminal, with the same decode loop as `run`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from outrider.common.process.extras import how_to_install
from outrider.common.process.logs import setup_logging
from outrider.edge_client.config.flags import add_config, load_run_config, without_token_limit
from outrider.edge_client.config.gate import gate_warning
from outrider.edge_client.config.methods import check_draft_paths, warning
from outrider.edge_client.config.run_config import RunConfig, draft_dir
from outrider.edge_client.session.factory import create_edge
from outrider.edge_client.tokenization.chat_template import ChatTemplate, load_chat_template
from outrider.edge_client.ui.conversation import Conversation
from outrider.edge_client.ui.repl import Repl

_DESCRIPTION = """\
Talk with the model. What you type becomes the user's message, by the model's own chat template
(chat_template.jinja or tokenizer_config.json beside the draft, or --chat-template FILE). A model without
one is not trained for conversation: your lines and its answers then form one text that it continues.
An answer ends where the model ends it or where the context is full, unless --max-new-tokens N is given;
without a chat template it has at most 256 tokens by default."""
_EPILOG = """\
while you type:
  a line that ends in \\ goes on in the next one; \"\"\" begins and ends a message of several lines
  /stats    what the last answer took: rounds, acceptance, bytes, times
  /mode M   another --mode from now on; without M, which it is and which there are
  /system T set the system message and begin anew ("": none); without T, which it is; needs a chat template
  /reset    forget the conversation
  /quit     leave (so does Ctrl-D)
  Ctrl-C    stops the answer, and never the program
  arrow keys bring back what you typed; --history FILE keeps it for the next time; without, nothing is

Accepted drafts are green, the target's corrections yellow, unverified tokens red and underlined;
NO_COLOR=1 turns colours off. Lines from a pipe are all answered; the exit status is that of the first that failed.
Flags from --verifier on are also keys of --config FILE and variables OUTRIDER_EDGE_<KEY>."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `chat`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--history", type=Path, metavar="FILE",
        help="keep there what is typed on the terminal, for the arrow keys of the next time",
    )  # fmt: skip
    parser.add_argument(
        "--chat-template", dest="serve.chat_template", default=argparse.SUPPRESS, metavar="FILE",
        help="Jinja file to use instead of the tokenizer's own chat template",
    )  # fmt: skip
    add_config(parser)


def main(namespace: argparse.Namespace) -> int:
    """Returns the exit status when the user leaves. Raises `OutriderError`."""
    loaded = load_run_config(namespace)
    setup_logging(loaded.value.logs.level)
    template = _load_template(loaded.value)
    config = loaded.value if template is None else without_token_limit(loaded).value
    check_draft_paths(config, config.mode.has_draft)
    edge = create_edge(config, has_draft=None)
    for line in filter(None, (warning(config), gate_warning(config))):
        print(f"edge-client: {line}", file=sys.stderr)
    try:
        conversation = Conversation(edge, template, namespace.system)
        # NO_COLOR is no setting of ours but a convention of terminals (no-color.org).
        has_colour = not os.environ.get("NO_COLOR")
        repl = Repl(conversation, sys.stdin, sys.stdout, has_colour=has_colour, history=namespace.history)
        return repl.run()
    finally:
        edge.close()


def _load_template(config: RunConfig) -> ChatTemplate | None:
    try:
        return load_chat_template(
            draft_dir(config), config.serve.chat_template, config.serve.chat_template_kwargs
        )
    except ModuleNotFoundError:
        print(f"edge-client: chat templates need jinja2: {how_to_install('daemon')}", file=sys.stderr)
        return None

"""Holds what all requests share: the edge, its pool of draft sequences, the queue and the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from outrider.common.config.addresses import is_loopback, split_address
from outrider.common.config.loader import Loaded, value_of, with_values
from outrider.common.errors import InvalidFieldError, LinkError, RoundFailedError, UsageError
from outrider.common.grammar.vocabulary import FIELD
from outrider.common.process.logs import set_log_level
from outrider.common.types import TokenIds, TokenLogprobs
from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.config.request_settings import OF_DRAFT
from outrider.edge_client.config.run_config import RunConfig, draft_dir
from outrider.edge_client.controller.slow_draft import slow_draft_note
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import SessionStats
from outrider.edge_client.daemon.activity import Activity
from outrider.edge_client.daemon.admission import Admission
from outrider.edge_client.daemon.http.keys import Keys, owner_of
from outrider.edge_client.daemon.metrics import DaemonMetrics, DaemonState
from outrider.edge_client.daemon.openai.choices import Choice, Plan, make_choices
from outrider.edge_client.daemon.openai.errors import ApiError, from_failure, invalid, stopping, unsupported
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.openai.request_config import config_of
from outrider.edge_client.daemon.openai.tool_settings import tool_changes
from outrider.edge_client.daemon.tools.families import FAMILIES, ToolFamily, family_of
from outrider.edge_client.daemon.verifier_watch import VerifierState, VerifierWatch
from outrider.edge_client.session.factory import Edge, create_link, draw_seed
from outrider.edge_client.session.scoring import TextScoring
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.session.shared_edge import Prepared, create_shared_edge
from outrider.edge_client.tokenization.chat_template import ChatTemplate, load_chat_template
from outrider.edge_client.transport.connection import CancelledByUser

log = logging.getLogger(__name__)

# What a running process cannot take up; everything else a SIGHUP reloads.
NEEDS_RESTART = (
    *OF_DRAFT,
    "min_draft_ms",
    "otlp_endpoint",
    "serve.listen",
    "serve.insecure",
    "serve.draft_cache_mb",
    "serve.log_json",
)
_NO_TEMPLATE = (
    "this model has no chat template: neither chat_template.jinja nor tokenizer_config.json in {} has one. "
    "Start the daemon with --chat-template FILE, or use /v1/completions"
)
_NO_SCORES = "with echo it takes the method threshold, which this verifier does not offer (its --methods)"
_NO_TOOLS = (
    "the chat template {} has no tools, or calls of a form that is not read here; there are those of "
    + ", ".join(family.name for family in FAMILIES)
)


class Daemon:
    """Loads the models at once. `load` reads the configuration again. Raises what `create_edge` and
    `load_chat_template` raise."""

    def __init__(self, load: Callable[[], Loaded[RunConfig]]) -> None:
        self._load = load
        self.config = load().value
        self.directory = draft_dir(self.config)
        self.keys = Keys.read(self.config.serve)
        _check(self.config, self.keys)
        self.template: ChatTemplate | None = self._load_template(self.config)
        self._shared = create_shared_edge(self.config)
        self.edge: Edge = self._shared.edge
        if self.edge.grammars is not None:
            self.edge.grammars.is_checked = True
        self.admission = Admission(self.serve.max_requests, self.serve.max_queue)
        self.activity = Activity()
        self.watch = VerifierWatch()
        self.metrics = DaemonMetrics(self._state)
        self._has_noted_slow_draft = False
        self._shared.warm_up()

    @property
    def serve(self) -> DaemonConfig:
        """Returns the configuration of the daemon itself."""
        return self.config.serve

    def _state(self) -> DaemonState:
        verifier = self.watch.state
        return DaemonState(
            model_name=self.serve.model_name,
            num_running=self.admission.num_running,
            num_waiting=self.admission.num_waiting,
            max_running=self.admission.max_running,
            num_idle_sequences=self._shared.num_idle,
            num_idle_bytes=self._shared.num_idle_bytes,
            is_verifier_reachable=verifier.is_reachable if verifier and self._needs_verifier else None,
        )

    @property
    def _needs_verifier(self) -> bool:
        return self.config.mode is not ExecutionMode.EDGE_ONLY

    async def check_verifier(self) -> VerifierState | None:
        """Returns whether the verifier answers now, from a call at most `FRESH_S` ago; None in mode edge-only, which
        needs none."""
        return await self.watch.check(self.config) if self._needs_verifier else None

    async def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a model that is not served; None asks for the one there is. Asks the verifier for
        its target where another name than the daemon's is not that of the last one known: 503 where none ever was."""
        if name in (None, self.serve.model_name):
            return
        if _target_of(self.watch.state) == name:
            return
        state = await self.watch.check(self.config)
        if state.model is None:
            raise from_failure(LinkError(f"whether {name!r} is the target is not known yet: {state.trouble}"))
        if _target_of(state) != name:
            message = f"the model {name!r} does not exist; {self.serve.model_name!r} does"
            raise ApiError(404, message, param="model", code="model_not_found")

    def plan(self, parsed: ParsedRequest) -> Plan:
        """Returns what a request generates; encoding long prompts takes time. Raises `OutriderError` and `ApiError`."""
        prompts = self._encode(parsed)
        config = config_of(self.config, parsed, self._tool_changes(parsed))
        seed = draw_seed() if config.seed is None else config.seed
        echoes = [self._echo(each) if parsed.has_echo else "" for each in parsed.prompts or ("",)]
        return Plan(config, make_choices(prompts, parsed.num_choices, seed, echoes))

    def prepare(self, parsed: ParsedRequest, plan: Plan, choice: Choice, key: str = "") -> Prepared:
        """Returns a session for one text of a request. A draft that keeps texts keeps them for the holder of the API
        `key` that was shown, and for its `user` where the request names one. Raises `OutriderError` and `ApiError`."""
        config = replace(plan.config, seed=choice.seed)
        owner = owner_of(key if self.keys else "", parsed.user)
        try:
            return self._shared.prepare(choice.prompt_ids, config, owner=owner)
        except UsageError as error:
            cause, param = error.__cause__, parsed.constraint_param
            if param and isinstance(cause, InvalidFieldError) and cause.field == FIELD:
                raise invalid(param, cause.reason) from error
            raise

    def scoring(self, plan: Plan) -> TextScoring:
        """Returns the scoring of one prompt, which `score` has to run and any thread may cancel."""
        config = plan.config
        link = create_link(config, session_id := new_session_id())
        scoring = TextScoring(link, session_id, config.logprobs, config.outage.recover_timeout_s)
        self.activity.scorings.add(scoring)
        return scoring

    def score(self, scoring: TextScoring, ids: TokenIds) -> list[TokenLogprobs | None]:
        """Returns the target's log-probabilities of a prompt's tokens after the first. Raises `OutriderError`, and
        `ApiError` where this verifier does not tell them or the scoring was cancelled."""
        try:
            return scoring.run(ids[:1], ids[1:])
        except RoundFailedError as error:
            if error.error.field == "method":
                raise unsupported("logprobs", _NO_SCORES) from error
            raise
        except CancelledByUser:
            raise stopping() from None
        finally:
            self.activity.scorings.discard(scoring)

    def note_slow_draft(self, mode: ExecutionMode, stats: SessionStats) -> None:
        """Logs, once, that drafting makes texts slower than the target alone."""
        if not self._has_noted_slow_draft and (note := slow_draft_note(mode, stats)):
            self._has_noted_slow_draft = True
            log.warning(note)

    def _encode(self, parsed: ParsedRequest) -> list[TokenIds]:
        """Returns the prompts' token ids: a completion's, or those of a chat as the template has it."""
        encode = self.edge.tokenizer.encode
        if parsed.kind is Kind.COMPLETION:
            return [tuple(encode(each) if isinstance(each, str) else each) for each in parsed.prompts]
        if self.template is None:
            message = _NO_TEMPLATE.format(self.directory)
            raise ApiError(400, message, param="messages", code="no_chat_template")
        if self.tool_family is None and any(
            "tool_calls" in each or each["role"] == "tool" for each in parsed.messages
        ):
            raise unsupported("messages", f"calls of tools: {_NO_TOOLS.format(self.template.origin)}")
        tools = [tool.definition for tool in parsed.tool_use.tools] if parsed.tool_use else None
        for name in self.template.reserved_names & parsed.template_variables.keys():
            raise invalid(
                f"chat_template_kwargs.{name}", "is set by the request's other fields or by the model"
            )
        text = self.template.render(parsed.messages, tools, parsed.template_variables)
        return [tuple(encode(text, is_complete=True))]

    def _echo(self, prompt: str | TokenIds) -> str:
        return prompt if isinstance(prompt, str) else self.edge.tokenizer.decode(prompt)

    def _tool_changes(self, parsed: ParsedRequest) -> dict[str, object]:
        """Returns the settings that a request with tools needs. Raises `ApiError` where the template has none."""
        if parsed.tool_use is None:
            return {}
        family = self.tool_family
        if family is None:
            raise unsupported(
                "tools", _NO_TOOLS.format(self.template.origin if self.template else self.directory)
            )
        return tool_changes(family, parsed, self.edge.tokenizer)

    @property
    def tool_family(self) -> ToolFamily | None:
        """Returns how the chat template has tools called; None where it has no tools, or calls of an unknown form."""
        if self.template is None:
            return None
        return family_of((self.template.for_tools or self.template).source)

    # -------------------------------------------------------------------------------------- changes

    def reload(self) -> list[str]:
        """Reads the configuration again and applies it; returns the keys that need a restart. Raises
        `OutriderError` and changes nothing where a start would refuse it."""
        config, held_back = _keep(self.config, self._load().value, NEEDS_RESTART)
        keys, template = Keys.read(config.serve), self._load_template(config)
        _check(config, keys)
        self._shared.check(config)
        self.config, self.keys, self.template = config, keys, template
        self.edge.config = config
        set_log_level(config.logs.level)
        self.admission.set_bounds(config.serve.max_requests, config.serve.max_queue)
        self.watch.forget()
        return held_back

    def close(self) -> None:
        """Frees the pool and the draft."""
        self._shared.close()

    def check_integrity(self) -> None:
        """Asserts that the queue and the pool are consistent."""
        self.admission.check_integrity()
        self._shared.check_integrity()

    def _load_template(self, config: RunConfig) -> ChatTemplate | None:
        return load_chat_template(
            self.directory, config.serve.chat_template, config.serve.chat_template_kwargs
        )


def _target_of(state: VerifierState | None) -> str | None:
    """Returns the name of the target that a verifier told, None where it told none."""
    return state.model.model_id if state is not None and state.model is not None else None


def _check(config: RunConfig, keys: Keys) -> None:
    create_link(config, new_session_id())
    listen = config.serve.listen
    host, _ = split_address(listen, "--listen", "127.0.0.1:7079")
    if not is_loopback(host) and not keys and not config.serve.insecure:
        raise UsageError(
            f"--listen {listen}: others reach this address, and no API key guards it; "
            "add --api-key-file FILE, or --insecure if the network is yours and trusted"
        )


def _keep(old: RunConfig, new: RunConfig, keys: tuple[str, ...]) -> tuple[RunConfig, list[str]]:
    """Returns `new` with the values that `old` has under `keys`, and which of those differed."""
    differing = [key for key in keys if value_of(old, key) != value_of(new, key)]
    return with_values(new, **{key: value_of(old, key) for key in differing}), differing

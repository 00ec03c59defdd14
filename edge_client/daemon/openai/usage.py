"""The usage block of an answer with several choices; that of one choice is its session's own."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.edge_client.daemon.openai.choices import Choice
from outrider.edge_client.session.shared_edge import Prepared


def usage_of(
    choices: Sequence[Choice], prepared: Sequence[Prepared], is_prompt_only: bool
) -> dict[str, object]:
    """Returns the counts of all choices together, a prompt counted once, and under `outrider.choices` each one's own,
    its seed among them."""
    usages = [each.usage for each in prepared]
    if len(usages) == 1 and not is_prompt_only:
        return usages[0]
    own = [usage["outrider"] for usage in usages]
    num_prompt = sum(len(choice.prompt_ids) for choice in choices if choice.is_first_of_prompt)
    num_new = 0 if is_prompt_only else sum(len(each.session.result.token_ids) for each in prepared)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "outrider": {
            "seed": choices[0].seed,
            "choices": [
                {"index": choice.index, **each}
                for choice, each in zip(choices, own, strict=True)
                if isinstance(each, dict)
            ],
        },
    }

"""The tuned constants of the controller, each with its unit and where its value comes from."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEPTH = 64  # tokens drafted in a round at most: what a verifier takes unless configured otherwise


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Holds every constant that depth policies, round windows and the choice of the mode are tuned by.

    "Bench" is `make bench-controller` (virtual time, recorded acceptance); `docs/controller.md` has its
    figures. A weight "per round" or "per token" is what an observation keeps with each later one.
    """

    # Acceptance by position and by confidence. By hand; bench `ctl.optimal` is 1.03 with them.
    acceptance_memory_per_round: float = 0.98  # an observation's weight halves in 34 rounds
    prior_weight_tokens: float = 10.0  # of the prior's mean in the mean over all positions
    overall_weight_tokens: float = 8.0  # of that mean in each position
    neighbour_share: float = 0.8  # of a position's tokens that count for the next position too ...
    max_neighbour_tokens: float = 30.0  # ... and at most so many
    confidence_bins: tuple[float, ...] = (0.05, 0.15, 0.3, 0.6, 0.9)  # borders; drafts are sure or not
    prior_reject_slope: float = 0.3  # P(reject) : (1 - confidence), before any token was judged
    carried_calibration_share: float = 0.5  # of a sequence's calibration, to the next one
    reject_slope_weight_tokens: float = 1.0  # of a prior slope, in rejected tokens
    min_doubt: float = 0.05  # of a fully confident draft: the target may still disagree

    # Posterior of the acceptance rate. The prior is where drafts usually are. A share of 0.5 with decisions
    # every 64 tokens was tried: better in bench `ctl.auto` at acceptance 0.95 (1.19), worse on recorded ones
    # (1.10).
    usual_accepted_tokens: float = 16.0
    usual_rejected_tokens: float = 4.0
    usual_share: float = 0.95  # of the prior; the rest is uniform, and all of it of a draft that copies
    # Of a place in the prompt, beside a judged token's 1: the prompt is not the target's own text. Of five on first
    # texts of seven drafts of three targets; `make bench-bank` plays it on others, and leaves pairs out.
    prompt_weight: float = 0.75
    # By hand: places of the prompt to compare, and the judged tokens of earlier texts from which on none are.
    num_prompt_choices: int = 16
    enough_judged_tokens: int = 32
    change_probability: float = 0.012  # a judged token, that the rate is another one from here
    max_remembered_sequences: int = 9  # beside the usual prior, whose weight mattered by 0.2 % in a trial

    # Acceptance of runner-ups, by the gap of the two scores in nats: the embedded pair's own rates, 2,048
    # positions at temperature 0.8 (table in docs/controller.md).
    gap_bins_nats: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
    prior_reject_by_gap: tuple[float, ...] = (0.63, 0.48, 0.37, 0.26, 0.06, 0.01, 0.002)
    prior_runner_up_by_gap: tuple[float, ...] = (0.33, 0.30, 0.24, 0.17, 0.035, 0.008, 0.001)
    gap_prior_weight_tokens: float = 8.0
    gap_memory_per_token: float = 0.995  # of its bin

    # Costs of rounds. Medians over few rounds follow a step of the link in four rounds (bench `ctl.step`).
    num_rtt_samples: int = 7  # a step is followed once most of them have it; an outlier never is
    num_verify_samples: int = 15
    token_share_of_verify: float = 0.3  # that grows with the draft, until lengths differed; by hand
    token_share_weight_tokens: float = 12.0  # of that assumption, as a difference of lengths
    # Of the slope that the verifier states, in the line that is followed down to one token. Chosen on rounds of two
    # pairs over loopback, seen on a third one (docs/controller.md).
    stated_weight_tokens: float = 100.0
    token_share_of_target: float = 0.03  # the same for a target seen in a stream; twice the bench's 1.5 %
    # Whose tokens a round waits for; below, it is alone but for a short queue.
    min_sharing_sessions: float = 1.5
    # Of a draft whatever its length, until lengths differed: medians of real ones.
    draft_call_s: float = 0.0003
    draft_weight_tokens: float = 12.0  # of that assumption, as a difference of lengths
    round_overhead_s: float = 0.0006  # an edge's own time a round, before it was measured
    # Of a streamed token beyond the verifier's step, before it was measured.
    stream_overhead_s: float = 0.0004
    max_stream_overhead_s: float = 0.003  # a busy moment must not keep later sequences from streaming
    stream_overhead_memory: float = 0.5  # of a sequence, with each later one
    stream_overhead_weight_samples: int = 4  # of earlier sequences' beside the present stream's samples
    min_rtt_s: float = 1e-6  # keeps rates finite on loopback

    # Trees. Shares: the target's token by rank of the draft's score plus noise, .79 .92 .95 .97 for 1 to 4 children
    # (`make bench-trees`).
    second_choice_share: float = 0.6  # of tokens that are not the first choice
    later_choice_share: float = 0.4  # of those that are none of the choices before
    # By which a tree is expected to be faster than chains, one at a time or pipelined. Chosen of .03, .05 and .1 in
    # virtual time, with seven drafts of three targets (docs/controller.md); judged in real processes
    # (`make bench-trees ARGS="--only defaults"`, docs/trees.md).
    min_tree_gain_share: float = 0.1
    # Drafting a tree, until one was drafted: as long as so many tokens of a chain, and for each node a share of one.
    tree_base_tokens: float = 8.0
    tree_node_share: float = 0.6
    tree_row_ratio: float = 1.4  # verifying a node : a chain's token, on a CPU with exact rows
    # Weights of the expectations that trees bring the tokens that the cost model says, in the time that it says.
    tree_yield_weight_tokens: float = 40.0
    tree_excess_weight_rounds: float = 3.0

    # Rejections that a speculative branch anticipated. By hand, with bench `ctl.guesses` and `ctl.auto`.
    branch_memory_per_rejection: float = 0.98
    branch_prior_weight_rejections: float = 8.0
    branch_prior_hit_share: float = 0.3  # of rejections, before rounds were pipelined; 0.4 on recorded ones
    branch_spared_share: float = 0.6  # of a round trip that a branch which came true spares

    # The choice of the mode. By hand, against bench `ctl.auto`; docs/controller.md names what was tried.
    horizon_tokens: int = 256  # a sequence may end long before its limit
    decision_interval_tokens: int = 16  # a mode is assumed to hold for about so long
    min_gain_share: float = 0.03  # of that interval's time: two modes that cost the same must not alternate
    first_gain_share: float = 0.1  # of it by which rounds must be better to be begun with
    # Of pipelined rounds over their model, as no doubt ends a draft; and the weight, beside measured rounds, of this
    # and of the expectation that the other modes take what the cost model says.
    pipelined_excess_share: float = 0.03
    # The same where a draft and the verification that it overlaps share this machine's processors: the median of what
    # four pairs of three targets took on two cores (docs/controller.md).
    shared_excess_share: float = 0.2
    time_ratio_weight_rounds: float = 8.0
    longest_gap_rounds: float = 4.0  # by hand: between two answers, that a mode takes; a stall is longer
    min_alpha_probability: float = 0.002  # of a rate, below which a decision leaves it out
    cost_tolerance_share: float = 0.03  # a cost that changed by less leaves the table of times as it is
    min_rounds: int = 2  # before round times are used: the first finds cold caches
    # Of a sequence, whose records are observed before the next draft: a plan takes half a millisecond then. In virtual
    # time, where it takes none, 4 are as good as 8.
    dense_rounds: int = 4
    rounds_a_plan: int = 4  # later on, where rounds are so short that a plan is a noticeable part of them:
    short_round_ms: float = 20.0
    dense_decisions: int = 16  # observations after a change that are each followed by a decision ...
    decision_every: int = 4  # ... and later every so many
    length_memory_per_round: float = 0.8
    lengths_tried: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)  # one is near the best
    min_round_probability: float = 0.02  # that rounds beat the stream: below, the draft is probed seldom
    max_probe_share: float = 0.5  # of the time between two streamed tokens that probing the draft may take
    probe_every_tokens: int = 4  # while the target streams and the draft is slow
    probe_useless_every_tokens: int = 32  # where rounds are hardly likely to be better

    stream_sample_tokens: int = 4  # streamed tokens to one measured time between tokens
    rtt_probe_interval_s: float = 1.0  # while the target streams, whose tokens do not show the round trip

    # Rounds in flight.
    min_branch_probability: float = 0.05  # of a speculative branch to be judged; at 0.02 twice the messages
    max_in_flight: int = 16  # speculative branches included; a verifier lets 32 of a session's requests wait
    max_unanswered: int = 30  # the same bound, dropped rounds included


SETTINGS = ControllerSettings()

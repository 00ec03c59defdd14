"""The tuned constants of the controller, each with its unit and where its value comes from."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEPTH = 64  # tokens drafted in a round at most: what a verifier takes unless configured otherwise


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Holds every constant that depth policies, round windows and the choice of the mode are tuned by.

    `make bench-bank` tries other values of each, in virtual time with recorded acceptance, and judges them on pairs
    that they were not chosen on; `benchmarks/controller/fit.py` names those that it cannot judge and what they rest
    on. "By hand": chosen by trying, without a record. A memory "per round" or "per token" is the factor that an
    observation's weight takes with each later one. A weight "in tokens" is how many observed tokens an assumption
    counts as.
    """

    # Acceptance by position and by confidence. By hand.
    acceptance_memory_per_round: float = 0.98  # an observation's weight halves in 34 rounds
    prior_weight_tokens: float = 10.0  # weight of the prior rate in the rate over all positions
    overall_weight_tokens: float = 8.0  # weight of the rate over all positions in the rate of one position
    # What was observed of a position also counts for the next one: this share of its tokens, at most so many.
    neighbour_share: float = 0.8
    max_neighbour_tokens: float = 30.0
    confidence_bins: tuple[float, ...] = (0.05, 0.15, 0.3, 0.6, 0.9)  # borders of the bins
    # P(reject) = slope · (1 − confidence): the slope before any token was judged, and its weight in rejected tokens.
    prior_reject_slope: float = 0.3
    reject_slope_weight_tokens: float = 1.0
    min_doubt: float = 0.05  # least 1 − confidence: the target may reject any token
    carried_calibration_share: float = 0.5  # of what a sequence taught, to the process's next one

    # Posterior of the acceptance rate. The prior is where drafts usually are; it is mixed with a uniform one, and is
    # that alone for a draft that copies. A share of 0.5 with decisions every 64 tokens was better in bench `ctl.auto`
    # at acceptance 0.95 (1.19), worse on recorded acceptance (1.10).
    usual_accepted_tokens: float = 16.0
    usual_rejected_tokens: float = 4.0
    usual_share: float = 0.95  # of the mixture
    # What a compared place of the prompt counts as: less than a judged token, as the prompt is not the target's own
    # text. The best of five values on first texts of seven drafts of three targets.
    prompt_weight: float = 0.75
    # How many places of the prompt are compared, while fewer tokens than these were judged. By hand.
    num_prompt_choices: int = 16
    enough_judged_tokens: int = 32
    change_probability: float = 0.012  # that the rate becomes another one with a judged token
    max_remembered_sequences: int = 9  # whose posteriors join the prior, each with its weight

    # How often a drafted token is rejected, and how often its runner-up is then the correction, by the gap of their
    # scores in nats: rates of an earlier embedded pair, 2,048 positions at temperature 0.8.
    gap_bins_nats: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
    prior_reject_by_gap: tuple[float, ...] = (0.63, 0.48, 0.37, 0.26, 0.06, 0.01, 0.002)
    prior_runner_up_by_gap: tuple[float, ...] = (0.33, 0.30, 0.24, 0.17, 0.035, 0.008, 0.001)
    gap_prior_weight_tokens: float = 8.0  # weight of these rates in a bin
    gap_memory_per_token: float = 0.995

    # Costs of rounds. A median over n times follows a step of the link once most of them have it (four rounds in bench
    # `ctl.step`) and ignores an outlier.
    num_rtt_samples: int = 7
    num_verify_samples: int = 15
    # How much of a verification's time grows with the draft, and the weight of that assumption beside measured
    # differences between lengths. By hand.
    token_share_of_verify: float = 0.3
    token_share_weight_tokens: float = 12.0
    # Weight of the slope that the verifier states, where the measured line is extended down to one token. Chosen on
    # rounds of two pairs over loopback, judged on a third one (docs/controller.md).
    stated_weight_tokens: float = 100.0
    # How much of the target's time for a token each more token would take, where it was only seen to stream and the
    # verifier states no times. Twice the share that `make bench-bank` assumes.
    token_share_of_target: float = 0.03
    min_sharing_sessions: float = (
        1.5  # of a verifier, or that a round waits for; from here on others' tokens count
    )
    shared_wait_steps: float = 0.5  # steps that a request then waits for: it comes at any moment of one
    # A draft's time whatever its length, and the weight of that assumption. Medians of real drafts.
    draft_call_s: float = 0.0003
    draft_weight_tokens: float = 12.0
    round_overhead_s: float = 0.0002  # the edge's own time for a round, before it was measured
    # A streamed token's time beyond the verifier's step: before it was measured; at most, so that a busy moment does
    # not keep later sequences from streaming; how much of a sequence's value the next one's counts; and the number of
    # samples of the present stream that earlier sequences' value counts as.
    stream_overhead_s: float = 0.0
    max_stream_overhead_s: float = 0.003
    min_stream_share: float = 0.5  # a streamed token's time : the step's of one token, at least. By hand
    stream_overhead_memory: float = 0.5
    stream_overhead_weight_samples: int = 4
    # A stream that was left is less of the present with time: so many rounds forget a sample of it. Forgotten sooner,
    # it is expected to be faster than it was found to be, and entered again. Of 1, 4, 8 and 16 in real processes at one
    # point of `make bench-real` over loopback, judged at four others.
    rounds_a_stream_sample: int = 4
    min_rtt_s: float = 1e-6  # keeps rates finite on loopback

    # Trees. Shares: with 1 to 4 children, ranked by the draft's score plus noise, .79 .92 .95 .97 of the target's
    # tokens were among an earlier embedded draft's (`make bench-trees`).
    second_choice_share: float = 0.6  # of tokens that are not the first choice
    later_choice_share: float = 0.4  # of those that are none of the choices before
    # How much faster than chains, one at a time or pipelined, a tree must promise to be. Chosen of .03, .05 and .1 in
    # virtual time, with seven drafts of three targets (docs/controller.md); judged in real processes
    # (`make bench-trees ARGS="--only defaults"`, docs/trees.md).
    min_tree_gain_share: float = 0.1
    # Time of drafting a tree until one was drafted: that of so many tokens of a chain, and this share of one a node.
    tree_base_tokens: float = 8.0
    tree_node_share: float = 0.6
    tree_row_ratio: float = 1.4  # verifying a node : a chain's token, on a CPU with exact rows
    # Weights of the cost model's expectations of a tree: of its committed tokens, and of its time.
    tree_yield_weight_tokens: float = 40.0
    tree_excess_weight_rounds: float = 3.0

    # Speculative branches: how many rejections had a branch in flight that anticipated the correction. By hand, with
    # bench `ctl.guesses` and `ctl.auto`.
    branch_memory_per_rejection: float = 0.98
    branch_prior_weight_rejections: float = 8.0
    branch_prior_hit_share: float = 0.3  # before rounds were pipelined; 0.4 on recorded acceptance
    branch_spared_share: float = 0.6  # of a round trip that a branch which came true spares

    # The choice of the mode. By hand, against bench `ctl.auto`.
    horizon_tokens: int = 256  # how far ahead a decision looks: a sequence may end long before its limit
    decision_interval_tokens: int = 16  # how long a chosen mode is assumed to run before the next change
    # How much of that interval's time another mode must save to be taken, so that two of equal cost do not alternate;
    # and how much rounds must save that a text would begin with.
    min_gain_share: float = 0.03
    first_gain_share: float = 0.1
    # The same where other sessions share the verifier: they all see the same costs, and are fastest where most of them
    # have one mode for a whole text. Chosen in bench `ctl.shared` and in real processes under the load of
    # `real.capacity_load`, judged on no other cases.
    shared_gain_share: float = 0.3
    shared_first_gain_share: float = 0.05
    # By how much pipelined rounds exceed their model, as a round in flight is not ended by low confidence.
    pipelined_excess_share: float = 0.03
    # How much of a round trip to a verifier on the same machine is its processors' work, which nothing overlaps: all of
    # it (0.5 to 0.9 ms for four pairs), but at most so much, as the address may be the local end of a tunnel.
    max_link_work_s: float = 0.001
    # By how much a trip there may be late, as threads of both processes wait for one another: the interval at which
    # Python's threads take turns.
    max_shared_delay_s: float = 0.005
    time_ratio_weight_rounds: float = 8.0  # weight, in rounds, of the model's times beside measured ones
    longest_gap_rounds: float = 4.0  # a longer time between two answers is a stall. By hand
    min_alpha_probability: float = 0.002  # rates that are less likely are left out of a decision
    cost_tolerance_share: float = 0.03  # by how much a cost must change before times are tabulated again
    min_rounds: int = 2  # before round times are used: the first one finds cold caches
    # Policies plan while a round is in flight, as a plan takes half a millisecond: of rounds that are shorter than the
    # limit several at a time, but after each of the first ones. After the first longer ones they plan before the next
    # draft.
    dense_rounds: int = 4
    rounds_a_plan: int = 4
    short_round_ms: float = 20.0
    # After a change, so many observations are each followed by a decision; later every n-th is.
    dense_decisions: int = 16
    decision_every: int = 4
    length_memory_per_round: float = 0.8
    lengths_tried: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)  # some are near the best one
    # While the target streams, the draft is asked what it would have written: for each token; where that takes more
    # than this share of the time between two tokens, for every n-th; and for fewer where rounds are hardly likely to
    # be faster.
    max_probe_share: float = 0.5
    probe_every_tokens: int = 4
    min_round_probability: float = 0.02
    probe_useless_every_tokens: int = 32

    stream_sample_tokens: int = 4  # streamed tokens to one measured time between tokens
    rtt_probe_interval_s: float = 1.0  # while the target streams, as its tokens do not show the round trip

    # Rounds in flight.
    min_branch_probability: float = 0.05  # of a branch that is drafted; at 0.02 twice the messages
    max_in_flight: int = 16  # speculative branches included; a verifier lets 32 of a session's requests wait
    max_unanswered: int = 30  # the same bound, with rounds that a rejection made invalid


SETTINGS = ControllerSettings()

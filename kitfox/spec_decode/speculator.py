"""How many guesses a step takes: as many as make the whole batch's tokens come sooner, by what was seen so far."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from kitfox.config import SpeculationConfig
from kitfox.outputs import SpeculationStats
from kitfox.spec_decode.proposer import Proposal, Proposer
from kitfox.spec_decode.proposers import make_proposer

MAX_KNOWN_TOKENS = 512  # steps with more are prompts; what one token more costs there is not what drafts cost
ROW_COST = 0.06  # of a step of one token, for each further one, until it was seen
LEAST_GAIN = 1.03  # expected tokens a second, over none: below this, errors of the estimates decide
TIME_MEMORY = 0.1  # weight of the latest step in the mean of its size
OWN_MEMORY, ALL_MEMORY = 0.9, 0.995  # weight that a record keeps when a further proposal is judged
TRUST_MEMORY = 0.98  # what a request's record is worth a step later; so one that guessed badly is asked again
PRIOR_EVIDENCE = 2.0  # expected acceptances after which a request's own record counts as much as everybody's
DEAR_ASKING = 0.05  # of a step: a proposer that takes longer is a model
WORTH_MEMORY = 0.2  # weight of the latest step in what asking is worth
LONGEST_REST = 64  # steps
MAX_PROBABILITY = 0.98


class StepTimes:
    """Seconds a step takes by its number of tokens, learnt while the engine runs."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        if not 1 <= num_tokens <= MAX_KNOWN_TOKENS:
            return
        known = self._seconds.get(num_tokens)
        if known is None:
            self._sizes.insert(bisect_left(self._sizes, num_tokens), num_tokens)
            self._seconds[num_tokens] = seconds
        else:
            # One step that was held up by something else must not outweigh all others.
            self._seconds[num_tokens] = known + TIME_MEMORY * (min(seconds, 3 * known) - known)

    def expected(self, num_tokens: int) -> float:
        """Of a step of so many tokens: between the sizes seen next to it, or from the nearest one on."""
        if not self._sizes:
            return 1.0 + ROW_COST * num_tokens
        place = bisect_left(self._sizes, num_tokens)
        above = self._sizes[place] if place < len(self._sizes) else None
        if above == num_tokens:
            return self._seconds[num_tokens]
        if place == 0:
            assert above is not None
            return self._seconds[above] * (1 + ROW_COST * num_tokens) / (1 + ROW_COST * above)
        below = self._sizes[place - 1]
        if above is None:
            return self._seconds[below] * (1 + ROW_COST * num_tokens) / (1 + ROW_COST * below)
        share = (num_tokens - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])


class Record:
    """How well a proposer's estimates held: acceptances seen over acceptances expected."""

    def __init__(self) -> None:
        self.expected = 0.0
        self.accepted = 0.0

    def add(self, expected: float, accepted: int, memory: float) -> None:
        self.expected = memory * self.expected + expected
        self.accepted = memory * self.accepted + accepted

    def factor(self, prior: float) -> float:
        """What to multiply an estimate by."""
        return (self.accepted + prior * PRIOR_EVIDENCE) / (self.expected + PRIOR_EVIDENCE)


class Speculator:
    """Asks a proposer for guesses, cuts them where they stop paying, and learns from what became of them.

    With `adaptive` off every guess is taken.
    """

    def __init__(self, config: SpeculationConfig, proposer: Proposer | None = None):
        """proposer: other than what the configuration names."""
        self._config = config
        self._proposer = proposer or make_proposer(config.method, **config.options)
        self._times = StepTimes()
        self._all = Record()
        self._records: dict[str, Record] = {}
        self._expected: dict[str, float] = {}  # acceptances of the drafts that are under way
        self._plain_s = self._drafted_s = 0.0  # what this step would take without drafts, and what it takes with them
        self._asking_s = self._saved_s = 0.0  # what this step's proposals cost, and what they saved
        self._worth_s = 0.0  # of asking, a step; falls and rises slowly
        self._rest, self._num_steps_to_rest = 1, 0
        self.stats = SpeculationStats()

    # ---- what happens to requests -------------------------------------------------------------------------------

    def start(self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None) -> None:
        """A request begins to run, or goes on after it was preempted."""
        self._records[request_id] = Record()
        self._proposer.start(request_id, token_ids, num_prompt_tokens=num_prompt_tokens, salt=salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens were appended to it."""
        self._proposer.extend(request_id, token_ids)

    def finish(self, request_id: str, *, keep: bool) -> None:
        """It ended, or was preempted (not keep)."""
        self._records.pop(request_id, None)
        self._expected.pop(request_id, None)
        self._proposer.finish(request_id, keep=keep)

    def flush_cache(self) -> None:
        """Forget KV of texts that are gone."""
        self._proposer.flush_cache()

    # ---- steps --------------------------------------------------------------------------------------------------

    def propose(self, limits: Mapping[str, int], num_tokens: int) -> dict[str, list[int]]:
        """Drafts for a step.

        Args:
            limits: most tokens for each request, >= 1.
            num_tokens: what the step computes without drafts.
        """
        if not limits:
            return {}
        if self._config.adaptive and self._num_steps_to_rest > 0:
            self._num_steps_to_rest -= 1
            return {}
        started = time.monotonic()
        most = self._config.num_draft_tokens
        proposals = self._proposer.propose({name: min(limit, most) for name, limit in limits.items()})
        self._asking_s = time.monotonic() - started
        self._saved_s = 0.0
        drafts = {name: proposal.token_ids for name, proposal in proposals.items() if proposal.token_ids}
        chances = {name: self._chances(name, proposals[name]) for name in drafts}
        if self._config.adaptive:
            lengths = self._lengths(chances, num_tokens, len(limits))
            for name, record in self._records.items():
                if name in drafts and not lengths.get(name):
                    record.add(0.0, 0, TRUST_MEMORY)
            drafts = {name: drafts[name][:length] for name, length in lengths.items()}
        for name, draft in drafts.items():
            self._expected[name] = sum(chances[name][: len(draft)])
        self._plain_s = self._times.expected(num_tokens)
        self._drafted_s = self._times.expected(num_tokens + sum(map(len, drafts.values())))
        return drafts

    def _chances(self, request_id: str, proposal: Proposal) -> list[float]:
        """How likely each draft token is to be reached and accepted; each at most the one before it."""
        factor = self._records[request_id].factor(self._all.factor(1.0))
        chances = []
        chance = 1.0
        for probability in proposal.probabilities:
            chance *= min(max(probability * factor, 0.0), MAX_PROBABILITY)
            chances.append(chance)
        return chances

    def _lengths(self, chances: Mapping[str, list[float]], num_tokens: int, num_answers: int) -> dict[str, int]:
        """How many of each request's drafts to take, for the most tokens a second; requests with none are left out."""
        # The likeliest first: of one request they come in their order, for none is likelier than the one before.
        ranked = sorted(_numbered(chances), key=lambda entry: -entry[0])
        best_rate = LEAST_GAIN * num_answers / self._times.expected(num_tokens)
        best, expected = 0, float(num_answers)
        for count, (chance, _, _) in enumerate(ranked, 1):
            expected += chance
            rate = expected / self._times.expected(num_tokens + count)
            if rate > best_rate:
                best, best_rate = count, rate
        lengths: dict[str, int] = {}
        for _, name, position in ranked[:best]:
            lengths[name] = max(lengths.get(name, 0), position + 1)
        return lengths

    def learn(self, request_id: str, num_drafts: int, num_accepted: int) -> float:
        """What became of the drafts of a request; returns how many seconds sooner it goes on, less than 0 for later."""
        expected = self._expected.pop(request_id, float(num_drafts))
        self._all.add(expected, num_accepted, ALL_MEMORY)
        self._records[request_id].add(expected, num_accepted, OWN_MEMORY)
        saved_s = num_accepted * self._plain_s - (self._drafted_s - self._plain_s) - self._asking_s
        self._saved_s += num_accepted * self._plain_s
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_drafts
        self.stats.num_accepted_tokens += num_accepted
        self.stats.saved_time_s += saved_s
        return saved_s

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """How long a step of so many tokens, drafts included, took; asking for them as well."""
        self._times.observe(num_tokens, seconds - self._asking_s)
        if self._asking_s > DEAR_ASKING * self._plain_s:
            self._judge_asking()
        self._asking_s = 0.0

    def _judge_asking(self) -> None:
        """A model that guesses takes time whether its guesses are used or not: have it rest while they bring less."""
        worth_s = self._saved_s - (self._drafted_s - self._plain_s) - self._asking_s
        self._worth_s += WORTH_MEMORY * (worth_s - self._worth_s)
        if self._worth_s >= 0:
            self._rest = 1
        else:
            self._num_steps_to_rest = self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)

    @property
    def memory_bytes(self) -> int:
        return self._proposer.memory_bytes


def _numbered(chances: Mapping[str, list[float]]) -> Iterable[tuple[float, str, int]]:
    return ((chance, name, position) for name, of_one in chances.items() for position, chance in enumerate(of_one))

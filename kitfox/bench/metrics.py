"""What records say: latencies, rates and goodput, and the table of everything that is compared.

Nothing is dropped or made up. A failed request counts in every share and rate, as one that was not answered. Tokens
are those the server counts: an answer without a count adds no tokens to a rate. Prompts that a server does not count
have the length they were sent with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kitfox.bench.records import OBJECTIVES, Distribution, Record, ServerSample, Slo, Summary
from kitfox.errors import ConfigError

# ---- objectives -----------------------------------------------------------------------------------------------------

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # the shorter unit last: every unit ends in it


def parse_slo(text: str) -> Slo:
    """Objectives as they are written on a command line: "ttft=500ms,itl=50ms,e2el=5s".

    Raises:
        ConfigError: an unknown or repeated objective, or a time without unit or not above 0.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in OBJECTIVES:
            raise ConfigError(f"slo: {name!r} is none of {', '.join(OBJECTIVES)}. Given: {text!r}", param="slo")
        if name in limits:
            raise ConfigError(f"slo: {name} is given twice. Given: {text!r}", param="slo")
        limits[name] = _seconds(name, value)
    return Slo(**limits)


def _seconds(name: str, value: str) -> float:
    unit = next((unit for unit in _SECONDS if value.endswith(unit)), None)
    try:
        number = float(value.removesuffix(unit or ""))
    except ValueError:
        raise ConfigError(f"slo: {name} must be a time such as 500ms or 0.5s. Given: {value!r}", param="slo") from None
    if unit is None:
        raise ConfigError(f"slo: {name}: give a unit: 500ms or 0.5s. Given: {value!r}", param="slo")
    if not 0 < number < math.inf:
        raise ConfigError(f"slo: {name} must be above 0. Given: {value!r}", param="slo")
    return number * _SECONDS[unit]


def missed_objectives(record: Record, slo: Slo) -> tuple[str, ...]:
    """The objectives that an answered request did not meet.

    An answer of a single chunk has no gaps and so meets those on them. Where a server counts no tokens, an objective
    on TPOT cannot be shown to be met, and is missed; so is one on TTFT or E2EL where nothing arrived.
    """
    met = {
        "ttft": _is_within(record.ttft_s, slo.ttft),
        "itl": len(record.chunk_s) < 2 or slo.itl is None or float(np.percentile(record.itl_s, 99)) <= slo.itl,
        "tpot": _has_no_later_tokens(record) or _is_within(record.tpot_s, slo.tpot),
        "e2el": _is_within(record.e2el_s, slo.e2el),
    }
    return tuple(name for name in OBJECTIVES if not met[name])


def _is_within(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


def _has_no_later_tokens(record: Record) -> bool:
    return len(record.chunk_s) < 2 or (record.output_tokens is not None and record.tpot_s is None)


# ---- a run ----------------------------------------------------------------------------------------------------------


def summarise(
    records: Sequence[Record],
    slo: Slo,
    samples: Sequence[ServerSample] = (),
    *,
    client_cpu_s: float,
    duration_s: float | None = None,
) -> Summary:
    """Sum up one run.

    `tokens_per_chunk` is taken over the answers whose tokens the server counts, and 0 where there are none.

    Args:
        duration_s: None takes the time from the first request's sending to the last one's end.
    """
    answered = [record for record in records if record.failure is None]
    misses = [missed_objectives(record, slo) for record in answered]
    good = sum(not missed for missed in misses)
    if duration_s is None:
        duration_s = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)

    def rate(count: float) -> float:
        return count / duration_s if duration_s else 0.0

    counted = [record for record in answered if record.output_tokens is not None]
    output_tokens = sum(record.output_tokens or 0 for record in counted)
    num_chunks = sum(len(record.chunk_s) for record in counted)
    prompt_tokens = sum(map(_prompt_tokens, answered))
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    memory = [sample.memory_bytes for sample in samples]
    return Summary(
        requests=len(records),
        failed=len(records) - len(answered),
        failures=_failures(records),
        duration_s=duration_s,
        requests_per_s=rate(len(answered)),
        goodput_per_s=rate(good),
        goodput_share=good / len(records) if records else 0.0,
        output_tokens_per_s=rate(output_tokens),
        total_tokens_per_s=rate(output_tokens + prompt_tokens),
        ttft=_distribution(record.ttft_s for record in answered),
        tpot=_distribution(record.tpot_s for record in answered),
        itl=_distribution(gap for record in answered for gap in record.itl_s),
        e2el=_distribution(record.e2el_s for record in answered),
        missed={
            name: sum(name in missed for missed in misses) for name in OBJECTIVES if getattr(slo, name) is not None
        },
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else 0.0,
        itl_is_per_chunk=any(not r.chunk_tokens and r.output_tokens != len(r.chunk_s) for r in answered),
        peak_memory_bytes=max(memory, default=None),
        mean_memory_bytes=round(sum(memory) / len(memory)) if memory else None,
        server_cpu_s=samples[-1].cpu_s if samples else None,
        client_cpu_share=rate(client_cpu_s),
        max_lag_s=max([0.0, *(r.sent_s - r.planned_s for r in records if r.planned_s is not None)]),
    )


def _prompt_tokens(record: Record) -> int:
    return (record.expected_prompt_tokens or 0) if record.prompt_tokens is None else record.prompt_tokens


def _failures(records: Sequence[Record]) -> dict[str, int]:
    """The most frequent first."""
    failures = (record.failure for record in records if record.failure is not None)
    return dict(Counter(f"http {f.status}" if f.kind == "http_status" else f.kind for f in failures).most_common())


def _distribution(samples: Iterable[float | None]) -> Distribution | None:
    values = np.array([sample for sample in samples if sample is not None])
    if not values.size:
        return None
    p50, p90, p99, most = np.percentile(values, (50, 90, 99, 100)).tolist()
    return Distribution(count=values.size, mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=most)


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """One number of a Summary, as it is compared and shown.

    Attributes:
        get: in the summary's own units; None where it is not known.
        unit, scale, digits: how it is shown: multiplied by scale, with so many decimals, in this unit.
    """

    label: str
    unit: str
    get: Callable[[Summary], float | None]
    higher_is_better: bool
    digits: int = 2
    scale: float = 1.0

    def format(self, value: float | None) -> str:
        """The number as it is shown, without its unit; a dash for None and nan."""
        return "–" if value is None or math.isnan(value) else f"{value * self.scale:.{self.digits}f}"


def _latencies() -> Iterator[tuple[str, Metric]]:
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "p50", "p90", "p99", "max"):
            metric = Metric(
                f"{name.upper()} {statistic}",
                "ms",
                _latency(name, statistic),
                higher_is_better=False,
                digits=1,
                scale=1e3,
            )
            yield f"{name}_{statistic}", metric


def _latency(name: str, statistic: str) -> Callable[[Summary], float | None]:
    return lambda summary: getattr(getattr(summary, name), statistic, None)


def _token_rate(name: str) -> Callable[[Summary], float | None]:
    """Unknown where requests were answered and the server counts no tokens; 0 where none was answered."""

    def get(summary: Summary) -> float | None:
        is_known = summary.output_tokens > 0 or summary.requests == summary.failed
        return getattr(summary, name) if is_known else None

    return get


def _cached_share(summary: Summary) -> float | None:
    if summary.cached_tokens is None or not summary.prompt_tokens:
        return None
    return summary.cached_tokens / summary.prompt_tokens


def _server_cpu(summary: Summary) -> float | None:
    if summary.server_cpu_s is None or not summary.output_tokens:
        return None
    return 1000 * summary.server_cpu_s / summary.output_tokens


_GIB = 1 / (1 << 30)

METRICS: dict[str, Metric] = {
    "goodput_per_s": Metric("Goodput", "req/s", lambda s: s.goodput_per_s, higher_is_better=True),
    "goodput_share": Metric("Requests that meet every objective", "%", lambda s: s.goodput_share, True, 1, 100),
    "requests_per_s": Metric("Answered requests", "req/s", lambda s: s.requests_per_s, higher_is_better=True),
    "output_tokens_per_s": Metric("Output tokens", "tok/s", _token_rate("output_tokens_per_s"), True, digits=1),
    "total_tokens_per_s": Metric("Total tokens", "tok/s", _token_rate("total_tokens_per_s"), True, digits=1),
    **dict(_latencies()),
    "peak_memory_bytes": Metric("Peak memory", "GiB", lambda s: s.peak_memory_bytes, False, scale=_GIB),
    "mean_memory_bytes": Metric("Mean memory", "GiB", lambda s: s.mean_memory_bytes, False, scale=_GIB),
    "cached_share": Metric("Prompt tokens from the cache", "%", _cached_share, True, 1, 100),
    "server_cpu_s_per_1000_tokens": Metric("Server CPU for 1000 output tokens", "s", _server_cpu, False),
    "failed": Metric("Failed requests", "", lambda s: s.failed, higher_is_better=False, digits=0),
}

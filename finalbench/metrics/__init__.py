"""Raw events -> rates and latencies: one definition each, pure."""

from __future__ import annotations

from finalbench.metrics.acceptance import Acceptance, acceptance
from finalbench.metrics.bandwidth import Bound, Memory, bandwidth_bound, bytes_per_step, memory_of
from finalbench.metrics.cache import cache_window, without_cache
from finalbench.metrics.distribution import FLOORS, Distribution, distribution
from finalbench.metrics.latency import tpot_s
from finalbench.metrics.rates import Rate
from finalbench.metrics.registry import METRICS, Metric, metric, within_bounds
from finalbench.metrics.rows import BlockRow, CellRow, Counts, DomainRow, MetricsTable
from finalbench.metrics.table import compute, compute_cell, measured
from finalbench.metrics.timing import NORMAL_FINISHES, Timing, count_tokens, fault, is_valid, timing
from finalbench.scenario import Limits

__all__ = [
    "FLOORS",
    "METRICS",
    "NORMAL_FINISHES",
    "Acceptance",
    "BlockRow",
    "Bound",
    "CellRow",
    "Counts",
    "Distribution",
    "DomainRow",
    "Limits",
    "Memory",
    "Metric",
    "MetricsTable",
    "Rate",
    "Timing",
    "acceptance",
    "bandwidth_bound",
    "bytes_per_step",
    "cache_window",
    "compute",
    "compute_cell",
    "count_tokens",
    "distribution",
    "fault",
    "is_valid",
    "measured",
    "memory_of",
    "metric",
    "timing",
    "tpot_s",
    "within_bounds",
    "without_cache",
]

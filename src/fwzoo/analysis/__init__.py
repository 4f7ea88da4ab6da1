"""Looking into memories: which slots are used, what the gates do, how a memory grows, what it holds and what it costs."""

from .memory import LayerReport, MemoryReport, memory_report

__all__ = ["LayerReport", "MemoryReport", "memory_report"]

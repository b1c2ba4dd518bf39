"""What people look at: timelines as pages and traces. Knows names and times, and no lanes, ranks, or tensors."""

from parawrap.displays._timeline import TIMELINE_SUFFIXES, Span, Timeline, read_timeline, refusal_of_path, write_timeline

__all__ = ["TIMELINE_SUFFIXES", "Span", "Timeline", "read_timeline", "refusal_of_path", "write_timeline"]

"""Which lane groups KV offload can take, and how many bytes of a token that is."""

from quire.layout.pages import CacheLayout, LaneGroup

SLOTS = 2  # of a staging: one layer is read from one while the other is filled


def offloaded_token_bytes(layout: CacheLayout) -> int:
    """Bytes that one token of an offloaded prefix takes, in all lanes that can have one."""
    groups = [group for group in layout.groups if can_be_offloaded(group)]
    per_page = [(g.num_lanes * g.page_class.page_bytes, g.page_class.tokens) for g in groups]
    return sum(-(-page_bytes // tokens) for page_bytes, tokens in per_page)


def can_be_offloaded(group: LaneGroup) -> bool:
    """Whether the first pages of a group's lanes can be on the host, and that frees anything."""
    return not group.private and group.window is None and len(group.layers) > SLOTS

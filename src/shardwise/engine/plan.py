"""A step plan: what the first rank decides, and all that the other ranks need to build the same batch."""

import msgspec

from shardwise.cache.host import Copies


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`count` tokens of a chunk, from its token `at` on, take the features of a picture from number `first` on."""

    digest: bytes
    at: int
    first: int
    count: int


class Encode(msgspec.Struct, frozen=True, array_like=True):
    """A picture of height x width patches whose features all ranks shall hold; see models.vision.Picture."""

    digest: bytes
    height: int
    width: int
    pixels: bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """`count` tokens of the request in `row`, from position `start` on.

    tokens: their ids, or empty: the one token sampled last for this row, which the runner holds on the device.
    new_pages: pages that the request got since its last chunk, in the order of positions.
    sample: whether the last of these tokens is followed by a sampled one.
    shift: what is added to places to get positions, behind the pictures of a prompt. axes: the positions themselves,
    int32 [3, count], where the chunk has or precedes a picture. spans: its tokens that are a picture's.
    reset: the request is new in this row (or is back): all that the row held before is forgotten. If its `start` is
    not 0, the row gets the state of row `restore`, and its page of position `start`, where that is not the first of the
    page, the contents of page `copy_page`; the pages before it are shared. Or, with `restore` 0, the plan copies state
    and pages from the host.
    """

    row: int  # 1 or more; row of state, of the page table and of the last tokens
    start: int
    count: int
    tokens: list[int] = []
    new_pages: list[int] = []
    sample: bool = False
    prompt_logits: bool = False  # logits of every token of the chunk are wanted (prompt logprobs)
    shift: int = 0
    axes: bytes = b""
    spans: list[Span] = []
    reset: bool = False
    restore: int = 0
    copy_page: int = 0
    check: bool = False  # the logits of the last token are wanted, to see if they are finite: its state will be kept


class Resize(msgspec.Struct, frozen=True, array_like=True):
    """From now on so many pages (that of padding included) and slots of experts; moves: pages with other numbers."""

    pages: int
    slots: int
    moves: dict[int, int] = {}


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Chunks of one step: those of one token first. No chunk: a sign of life, or with `stop` the end.

    Before the chunks, features are forgotten, then encoded.
    Before anything else happens to rows and pages: copies to the host; then saves, (row, snapshot row), states to copy;
    then chunks are reset and restored; then come copies from the host; then chunks are computed.
    """

    step: int
    chunks: list[Chunk] = []
    stop: bool = False
    encode: list[Encode] = []
    forget: list[bytes] = []
    saves: list[tuple[int, int]] = []
    host: Copies | None = None
    resize: Resize | None = None  # of a plan without chunks, after its copies to the host
    keep: int = 0  # how many of the likeliest of each row of logits matter; 0: all

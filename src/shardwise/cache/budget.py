"""How much of what memory becomes what: rows of state first, of requests and of the prefix cache's snapshots, then
pages of KV cache. Every rank affords the same.
"""

import logging
from dataclasses import dataclass

from shardwise.config import ConfigError, ModelConfig, ServeConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
USABLE_TOKENS = 2048  # of KV cache: with fewer than these, or than the longest request, nothing is served
LISTED_SHARE = 1 / 64  # of what weights leave, at most, for a copy of the head in 8 bits
STATE_SHARE = 0.5  # of free memory, at most, for state rows if their number is ours to choose
LEAST_SEQS = 8  # requests at once that are not given up for a longer context
SNAPSHOT_SHARE = 1 / 16  # of what the rows of requests leave, at most, for snapshots if their number is ours to choose
MOST_SNAPSHOTS = 64  # that we choose
HOST_STATE_SHARE = 0.5  # of the host tier, at most, for states
MOST_HOST_SNAPSHOTS = 4096
HOST_SHARE = 0.8  # of available host memory that the host tier may ask for
FLOOR_TOKENS = 32768  # of KV cache that slots of experts leave, or the longest request if that is shorter
SLOTTED_SEQS = 16  # requests at once, at most, where rows of state would take the memory of slots of experts
CPU_SHARE = 0.25  # of available host memory that caches may take


@dataclass(frozen=True)
class Defaults:
    """Limits that suit a kind of device, where the user gave none."""

    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS = {"cpu": Defaults(64, 1024), "cuda": Defaults(128, 8192)}
AMPLE_TOKENS, AMPLE_BYTES = 16384, 32 * GIB  # of a step of nothing but prompts, if so much is left beside the weights


@dataclass(frozen=True)
class Budget:
    """What all ranks provide. Rows and pages include number 0, which is padding and never given to a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    rows: int
    pages: int
    page_tokens: int
    snapshot_rows: int = 0  # rows of state behind `rows`
    host_pages: int = 0  # places of the prefix cache's host tier
    host_rows: int = 0
    expert_slots: int = 0  # of each layer; 0: all experts are on the device

    @property
    def kv_tokens(self) -> int:
        return (self.pages - 1) * self.page_tokens


def affords_list(serve: ServeConfig, left_bytes: int, list_bytes: int, slotted: bool) -> bool:
    """Whether a GPU that weights and a reserve leave `left_bytes` keeps a shortlist of the head; 0 `list_bytes`: there
    is none. slotted: experts are in slots, for which memory is first of all.
    """
    wanted = serve.shortlist and serve.kernels != "reference" and not slotted
    return wanted and 0 < list_bytes <= left_bytes * LISTED_SHARE


def step_tokens(serve: ServeConfig, device_type: str, free_bytes: int) -> int:
    """Tokens of the largest step: the user's number, or the device's default, or more where memory is ample."""
    usual = DEFAULTS[device_type].max_num_batched_tokens
    ours = AMPLE_TOKENS if device_type == "cuda" and free_bytes >= AMPLE_BYTES else usual
    return serve.max_num_batched_tokens or ours


def busy_tokens(serve: ServeConfig, device_type: str) -> int:
    """Tokens of the largest step in which any answer goes on: its next token waits for the whole step."""
    return serve.max_num_batched_tokens or DEFAULTS[device_type].max_num_batched_tokens


def sequences(
    serve: ServeConfig,
    device_type: str,
    free_bytes: int,
    row_bytes: int,
    request_bytes: int = 0,
    slotted: bool = False,
) -> int:
    """How many requests may run at once: the user's number, or the device's default while its rows fit.

    request_bytes: of the KV cache of the longest request, for which many rows make way. slotted: experts are in slots.
    """
    if serve.max_num_seqs:
        return serve.max_num_seqs
    count = min(DEFAULTS[device_type].max_num_seqs, SLOTTED_SEQS if slotted else 1 << 40)
    while count > 1 and (count + 1) * row_bytes > free_bytes * STATE_SHARE:
        count //= 2
    while count > LEAST_SEQS and (count + 1) * row_bytes + request_bytes > free_bytes:
        count //= 2
    return count


def snapshots(serve: ServeConfig, free_bytes: int, rows_bytes: int, row_bytes: int, request_bytes: int = 0) -> int:
    """How many recurrent states the prefix cache keeps beside the requests' `rows_bytes`: the user's number, or ours.

    request_bytes: of the KV cache of the longest request, for which ours make way.
    """
    if not serve.prefix_cache or serve.snapshot_rows:
        return serve.snapshot_rows if serve.prefix_cache else 0
    left_bytes = max(free_bytes - rows_bytes, 0)
    affordable_bytes = min(int(left_bytes * SNAPSHOT_SHARE), max(left_bytes - request_bytes, 0))
    return min(affordable_bytes // row_bytes, MOST_SNAPSHOTS) if row_bytes else MOST_SNAPSHOTS


def host_places(host_bytes: int, row_bytes: int, page_bytes: int) -> tuple[int, int]:
    """Pages and states that fit into a rank's part of the host tier; a state is of no use without a page."""
    rows = int(host_bytes * HOST_STATE_SHARE) // row_bytes if row_bytes else MOST_HOST_SNAPSHOTS
    rows = min(rows, MOST_HOST_SNAPSHOTS, host_bytes // (row_bytes + page_bytes))
    return min((host_bytes - rows * row_bytes) // max(1, page_bytes), 1 << 24), rows


def floor_bytes(serve: ServeConfig, model: ModelConfig, page_bytes: int) -> int:
    """Of KV cache, which slots of experts must leave."""
    longest = serve.max_model_len or model.max_position_embeddings
    tokens = serve.kv_reserve_tokens or serve.kv_tokens or min(longest, FLOOR_TOKENS)
    return (-(-tokens // serve.page_tokens) + 1) * page_bytes


def affordable_slots(serve: ServeConfig, left_bytes: int, slot_bytes: int, top_k: int, experts: int) -> int:
    """Slots of each layer that `left_bytes` hold, at most --expert-slots or one for each expert.

    left_bytes: beside rows of state and the floor of the KV cache; slot_bytes: of one slot in every layer. Raises
    ConfigError if the experts of one token, `top_k`, would not fit, or as many as were asked for.
    """
    most = min(serve.expert_slots or experts, experts)
    found = min(max(left_bytes, 0) // slot_bytes, most) if slot_bytes else most
    if found >= (most if serve.expert_slots else top_k) and most >= top_k:
        return found
    what = f"--expert-slots {serve.expert_slots}" if serve.expert_slots else f"--experts {serve.experts}"
    raise ConfigError(
        f"{what}: {max(left_bytes, 0) / GIB:.2f} GiB are left for slots of {slot_bytes / GIB:.3f} GiB, which makes "
        f"{max(left_bytes, 0) // max(slot_bytes, 1)} in every layer; a token wants {top_k} of {experts} experts at "
        "once; lower --kv-reserve-tokens, --max-num-seqs or --max-num-batched-tokens, or use more ranks"
    )


def affordable_pages(free_bytes: int, rows_bytes: int, page_bytes: int) -> int:
    """Pages that fit into what the rows leave; any number if this rank holds nothing of the KV cache."""
    return max(free_bytes - rows_bytes, 0) // page_bytes if page_bytes else 1 << 40


def idle_bytes(own_pages: int, pages: int, page_bytes: int) -> int:
    """What this rank has room for and does not use, because another affords only `pages` pages."""
    return max(0, own_pages - pages) * page_bytes if page_bytes else 0


def settle(
    serve: ServeConfig,
    model: ModelConfig,
    device_type: str,
    max_num_seqs: int,
    pages: int,
    snapshot_rows: int = 0,
    slots: int = 0,
    most_tokens: int = 0,
) -> Budget:
    """The limits of the server from the least number of requests, snapshots and pages that any rank affords.

    most_tokens: of a step; 0: as for a device whose memory is not ample.

    A cache smaller than asked for is made as large as it can be while that is of use, with a warning. Raises
    ConfigError if not, or if a request of --max-model-len tokens, or of one page, would not fit.
    """
    longest = serve.max_model_len or model.max_position_embeddings
    if serve.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {serve.max_model_len}: the model was made for {model.max_position_embeddings} tokens; "
            "give that or less, or a checkpoint whose config.json extends it (rope_parameters)"
        )
    size = serve.page_tokens
    per_request = -(-longest // size)
    wanted = -(-serve.kv_tokens // size) if serve.kv_tokens else max_num_seqs * per_request
    pages = min(pages - 1, wanted)
    usable = min(longest, USABLE_TOKENS, serve.kv_tokens or longest)
    if serve.kv_tokens and pages < wanted:
        fits = (
            f"--kv-tokens {serve.kv_tokens}: only {max(pages, 0) * size} tokens of KV cache fit beside the weights and"
        )
        fits = f"{fits} {max_num_seqs + snapshot_rows} rows of state"
        if pages * size < usable:
            raise ConfigError(f"{fits}; lower it, --max-num-seqs or --snapshot-rows, or use more ranks")
        logger.warning("%s; the cache is made as large as that", fits)
    if pages < 1 or (serve.max_model_len and pages < per_request):
        raise ConfigError(
            f"a request of {serve.max_model_len or size} tokens needs "
            f"{per_request if serve.max_model_len else 1} pages of KV cache and {max(pages, 0)} fit; "
            "lower --max-model-len, --max-num-seqs or --snapshot-rows, raise --gpu-memory-utilization or --kv-tokens, "
            "or use more ranks"
        )
    return Budget(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=most_tokens or step_tokens(serve, device_type, 0),
        max_model_len=min(longest, pages * size),
        rows=max_num_seqs + 1,
        pages=pages + 1,
        page_tokens=size,
        snapshot_rows=snapshot_rows,
        expert_slots=slots,
    )

"""Paged attention: the reference against a loop over queries and heads, and Triton against the reference."""
# pyright: reportCallIssue=false

import pytest
import torch

from shardwise.kernels.attention import reference
from shardwise.kernels.attention import triton as fast
from shardwise.kernels.attention.decode import split_count
from tests.kernels.sequences import make_sequences, make_step, naive_attention

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
# Contexts, queries: decodes alone, chunks alone, both; lengths that end on, before and after a page's end.
STEPS = {
    "decode": ([9], [1]),
    "decodes": ([0, 15, 16, 17, 40], [1] * 5),
    "prefill": ([0, 0], [5, 33]),
    "chunks": ([16, 15, 31], [17, 2, 3]),
    "mixed": ([33, 7, 0, 12], [1, 1, 20, 9]),
    "one_token_chunk_last": ([4, 3, 0], [1, 2, 1]),
}
HEADS = {"ragged": (2, [0, 0, 0, 0, 0, 1]), "one": (1, [0]), "crossed": (3, [2, 0, 1, 0]), "many": (2, [0] * 18 + [1])}


@BOTH
@pytest.mark.parametrize("sizes", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("kv_map", [HEADS["ragged"], HEADS["crossed"]], ids=["ragged", "crossed"])
@pytest.mark.usefixtures("poison")
def test_equals_a_loop_over_queries_and_heads(impl, sizes, kv_map, device):
    kv, head_map = kv_map
    step = make_step(*sizes, (len(head_map), kv, 32), 16, device)
    heads_N = torch.tensor(head_map, dtype=torch.int32, device=device)
    out_TND = impl.paged_attention(step.q_TND, step.k_pages, step.v_pages, step.seqs, heads_N, 0.2)
    torch.testing.assert_close(out_TND.cpu(), naive_attention(step, head_map, 0.2).float(), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("dim", "page_tokens", "kv_map"), [(48, 48, "many"), (64, 64, "one"), (80, 16, "ragged")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("poison")
def test_triton_equals_the_reference_at_odd_sizes(dim, page_tokens, kv_map, dtype, device):
    kv, head_map = HEADS[kv_map]
    step = make_step([70, 3, 0, 50], [1, 1, 21, 30], (len(head_map), kv, dim), page_tokens, device, dtype)
    args = step.k_pages, step.v_pages, step.seqs, torch.tensor(head_map, dtype=torch.int32, device=device), 0.1
    got, expected = (impl.paged_attention(step.q_TND, *args) for impl in (fast, reference))
    assert got.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@BOTH
@pytest.mark.usefixtures("poison")
def test_queries_may_be_a_view_of_queries_and_gates(impl, device):
    step = make_step([20, 0], [1, 7], (4, 2, 32), 16, device)
    heads_N = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=device)
    wide = torch.cat((step.q_TND, torch.full_like(step.q_TND, float("nan"))), -1)
    got, expected = (
        impl.paged_attention(q, step.k_pages, step.v_pages, step.seqs, heads_N, 0.2)
        for q in (wide[..., :32], step.q_TND)
    )
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected)


@BOTH
def test_nothing_to_do_is_an_empty_tensor(impl, device):
    pages = torch.zeros(1, 1, 16, 32, device=device)
    heads = torch.zeros(3, dtype=torch.int32, device=device)
    none = make_sequences([], [], 16, device)
    assert impl.paged_attention(pages.new_zeros(0, 3, 32), pages, pages, none, heads, 1.0).shape == (0, 3, 32)
    some = make_sequences([3], [1], 16, device)
    no_pages = pages[:, :0]
    out = impl.paged_attention(pages.new_zeros(1, 0, 32), no_pages, no_pages, some, heads[:0], 1.0)
    assert out.shape == (1, 0, 32)
    impl.store_kv(pages.new_zeros(1, 0, 32), pages.new_zeros(1, 0, 32), no_pages, no_pages, some.kv_slots_T)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_store_kv_fills_the_slots_and_nothing_else(impl, dtype, device):
    seqs = make_sequences([14, 0, 40], [1, 5, 20], 16, device)
    wide = torch.randn(26, 3, 96, generator=torch.Generator().manual_seed(0)).to(device) * 100
    k, v = wide[..., :48], wide[..., 48:]
    k_pages, v_pages = (torch.full((9, 3, 16, 48), 0.5, device=device).to(dtype) for _ in range(2))
    scales = (0.25, 2.0) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
    impl.store_kv(k, v, k_pages, v_pages, seqs.kv_slots_T, *scales)
    for x, pages, scale in ((k, k_pages, scales[0]), (v, v_pages, scales[1])):
        expected = torch.full((9, 3, 16, 48), 0.5, device=device)
        for t, slot in enumerate(seqs.kv_slots_T.tolist()):
            expected[slot // 16, :, slot % 16] = (x[t] / scale).clamp(-448, 448) if scale != 1 else x[t]
        torch.testing.assert_close(pages.float(), expected.to(dtype).float(), atol=0, rtol=0)


def test_fp8_codes_are_those_of_torch(device):
    """Every code, its neighbours' middles (ties) and what lies just beside them, and values beyond the largest."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat((codes, middles, middles * 1.001, middles * 0.999, torch.tensor([1e-9, 460.0, 1e9])))
    x = torch.cat((x, -x))[None, None].to(device)
    got, expected = (torch.zeros(1, 1, 16, x.numel(), device=device).to(torch.float8_e4m3fn) for _ in range(2))
    slot = torch.tensor([3], device=device)
    fast.store_kv(x, x, got, got.clone(), slot)
    reference.store_kv(x, x, expected, expected.clone(), slot)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.usefixtures("poison")
def test_fp8_pages(device):
    """Both implementations read what FP8 pages hold, times the scales."""
    step = make_step([18, 5, 0], [1, 1, 19], (6, 2, 32), 16, device)
    heads_N = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32, device=device)
    k_pages, v_pages = step.k_pages.to(torch.float8_e4m3fn), step.v_pages.to(torch.float8_e4m3fn)
    plain = reference.paged_attention(step.q_TND, k_pages.float() * 0.5, v_pages.float() * 4.0, step.seqs, heads_N, 0.2)
    for impl in (reference, fast):
        got = impl.paged_attention(step.q_TND, k_pages, v_pages, step.seqs, heads_N, 0.2, 0.5, 4.0)
        torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-5)


@BOTH
def test_a_padding_sequence_changes_nothing_else(impl, device):
    """In a graph, sequences of one token at page 0 fill up the batch."""
    step = make_step([20, 7], [1, 1], (2, 1, 32), 16, device)
    heads_N = torch.zeros(2, dtype=torch.int32, device=device)
    k_pages, v_pages = step.k_pages.clone(), step.v_pages.clone()
    k_pages[0], v_pages[0] = 1.0, 1.0
    seqs = step.seqs
    padded = type(seqs)(
        torch.arange(4, dtype=torch.int32, device=device),
        torch.cat((seqs.context_S, seqs.context_S.new_zeros(1))),
        torch.cat((seqs.state_rows_S, seqs.state_rows_S.new_zeros(1))),
        torch.cat((seqs.pages_SP, torch.zeros_like(seqs.pages_SP[:1]))),
        torch.cat((seqs.kv_slots_T, seqs.kv_slots_T.new_zeros(1))),
        decodes=3,
        max_query=1,
        max_length=4096,  # as a graph is captured: for the longest there may be
    )
    q_TND = torch.cat((step.q_TND, torch.ones_like(step.q_TND[:1])))
    got = impl.paged_attention(q_TND, k_pages, v_pages, padded, heads_N, 0.2)
    expected = impl.paged_attention(step.q_TND, k_pages, v_pages, seqs, heads_N, 0.2)
    torch.testing.assert_close(got[:2], expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got[2], torch.ones_like(got[2]))


def test_pages_that_differ_are_refused(device):
    k_pages = torch.zeros(2, 1, 16, 32, device=device)
    seqs = make_sequences([3], [1], 16, device)
    with pytest.raises(ValueError, match="allocate them alike"):
        fast.store_kv(k_pages[:1, :, 0], k_pages[:1, :, 0], k_pages, k_pages.half(), seqs.kv_slots_T)


def test_splits_follow_host_numbers():
    assert split_count(32768, 2, 132, 32) == 128  # the most
    assert split_count(128, 2, 132, 32) == 4  # no more than blocks
    assert split_count(4096, 32, 132, 32) == 8
    assert split_count(4096, 256, 132, 32) == 1  # a second split would start when others are done
    assert split_count(4096, 512, 132, 32) == 1
    assert split_count(0, 1, 132, 32) == 1


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("processors", [1, 30, 400])
def test_splits_make_no_difference(processors, device, monkeypatch):
    """One, some of a block and some of two, and one of each block, whose reduction is by parts of the columns."""
    monkeypatch.setattr(fast, "_card", lambda _: (processors, 64 * 1024))
    step = make_step([700, 3], [1, 1], (2, 1, 80), 16, device)
    heads_N = torch.zeros(2, dtype=torch.int32, device=device)
    arguments = (step.q_TND, step.k_pages, step.v_pages, step.seqs, heads_N, 0.1)
    got, expected = (impl.paged_attention(*arguments) for impl in (fast, reference))
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


@BOTH
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("processors", [8, 1])
def test_a_gate_multiplies_the_output(impl, processors, device, monkeypatch):
    """Decodes with their positions in several splits or in one, and a chunk; gates are slices of a wider tensor."""
    monkeypatch.setattr(fast, "_card", lambda _: (processors, 64 * 1024))
    step = make_step([38, 5, 4], [1, 1, 9], (4, 2, 32), 16, device)
    heads_N = torch.tensor([0, 0, 0, 1], dtype=torch.int32, device=device)
    gate = torch.randn(11, 4, 64, generator=torch.Generator().manual_seed(2)).to(device)[..., 32:]
    arguments = (step.q_TND, step.k_pages, step.v_pages, step.seqs, heads_N, 0.2)
    expected = reference.paged_attention(*arguments) * gate.sigmoid()
    got = impl.paged_attention(*arguments, gate_TND=gate)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gated", [False, True])
def test_chunks_of_the_family_equal_the_reference(gated, device):
    """Head dim, pages and a type for which there is a kernel of Hopper's own; lengths about its blocks' ends."""
    step = make_step([70, 0, 63, 130, 0, 64], [1, 129, 65, 190, 64, 2], (3, 2, 256), 64, device, torch.float16)
    heads_N = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    gate = torch.randn(451, 3, 512, generator=torch.Generator().manual_seed(3)).to(device, torch.float16)[..., 256:]
    arguments = (step.q_TND, step.k_pages, step.v_pages, step.seqs, heads_N, 1 / 16, 1.0, 0.5, gate if gated else None)
    got, expected = (impl.paged_attention(*arguments) for impl in (fast, reference))
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)

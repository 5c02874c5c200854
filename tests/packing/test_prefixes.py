"""Prefixes that sequences have in common: all of them are found, and every token is a copy of one that is kept."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cases import SAVED, nodes, pairs, words
from torch import Tensor

from fastpack import PackedSeqLens, PackingError
from fastpack.packing.prefixes import Prefixes, find_prefixes

few_words = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(torch.tensor)


def packed_of(sequences: list[Tensor]) -> PackedSeqLens:
    return PackedSeqLens.from_lengths([len(s) for s in sequences])


@given(st.lists(few_words, min_size=1, max_size=8))
@settings(deadline=None, max_examples=200)
def test_a_trie(sequences: list[Tensor]) -> None:
    """As many tokens are kept as there are different beginnings, and copies have the same tokens before them."""
    packed, ids = packed_of(sequences), torch.cat(sequences)
    prefixes = find_prefixes(packed.lengths, ids)
    assert sorted(prefixes.order) == list(range(len(sequences)))
    assert len(ids) - prefixes.saved == nodes(sequences)
    shared = packed.share(prefixes).shared
    assert shared is not None
    assert shared.total_tokens == nodes(sequences)
    copies = shared.copies
    begins = [tuple(s[: i + 1].tolist()) for s in sequences for i in range(len(s))]
    kept = [begins[t] for t in copies.first.tolist()]
    assert [kept[u] for u in copies.source.tolist()] == begins
    assert shared.position_ids[0].tolist() == [len(beginning) - 1 for beginning in kept]
    members = {u: (copies.source == u).nonzero()[:, 0].tolist() for u in range(len(kept))}
    listed = {u: some for rows, m in copies.several for u, some in zip(rows.tolist(), m.tolist(), strict=True)}
    assert listed == {u: some for u, some in members.items() if len(some) > 1}


def test_pairs() -> None:
    sequences = pairs()
    prefixes = find_prefixes([len(s) for s in sequences], torch.cat(sequences))
    assert prefixes.saved == SAVED
    for a, b, count in zip(prefixes.order, prefixes.order[1:], prefixes.shared[1:], strict=False):
        assert (count > 0) == (abs(a - b) == 4), "a chosen sequence and its rejected one, and no others"


def test_large_ids_and_bytes() -> None:
    """Ids that have bytes in common, and no token; the largest ones."""
    lengths = (3, 3, 3, 2)
    ids = torch.tensor([256, 5, 2**31 - 1, 256, 5, 2**31 - 2, 1, 0, 0, 256 + 2**16, 5])
    assert find_prefixes(lengths, ids).saved == 2


def test_positions_count() -> None:
    """The same ids at other positions are other tokens."""
    ids = torch.tensor([7, 8, 9, 7, 8, 5])
    assert find_prefixes((3, 3), ids).saved == 2
    assert find_prefixes((3, 3), ids, torch.tensor([0, 1, 2, 0, 1, 2])).saved == 2
    assert find_prefixes((3, 3), ids, torch.tensor([0, 1, 2, 0, 2, 3])).saved == 1
    assert find_prefixes((3, 3), ids, torch.tensor([0, 1, 2, 4, 5, 6])).saved == 0


def test_found_now_or_before() -> None:
    """Prefixes are found now, or taken from an earlier search; bucket padding is one more sequence."""
    sequences = pairs()
    packed, ids = packed_of(sequences), torch.cat(sequences)[None]
    assert packed.prefixes_in(ids).saved == SAVED
    bucketed = packed.bucketed()
    assert bucketed.prefixes_in(bucketed.unpad(ids)).saved >= SAVED
    message = Prefixes((0, 1), (0, 3))
    assert replace(packed, prefixes=message).prefixes_in(ids) is message


def test_known_to_be_shared_before_bucket_padding() -> None:
    """Prefixes that a collator found before the batch was rounded up."""
    sequences = pairs()
    packed, ids = packed_of(sequences), torch.cat(sequences)
    bucketed = packed.bucketed()
    run = bucketed.share(find_prefixes(packed.lengths, ids)).shared
    assert run is not None
    assert run.total_tokens == bucketed.total_tokens - SAVED
    assert torch.equal(run.keep_ids(bucketed.unpad(ids[None])), bucketed.unpad(ids[None])[:, run.copies.first])


def test_other_ids_are_refused() -> None:
    sequences = pairs()
    packed = packed_of(sequences)
    run = packed.share(find_prefixes(packed.lengths, torch.cat(sequences))).shared
    assert run is not None
    sequences[0][3] += 1
    with pytest.raises(PackingError, match="began alike now differ"):
        run.keep_ids(torch.cat(sequences)[None])


def test_made_once_and_carried() -> None:
    packed = packed_of([words(5, 0), words(5, 0)])
    prefixes = Prefixes((0, 1), (0, 5))
    run = packed.share(prefixes)
    assert packed.share(Prefixes((0, 1), (0, 5))) is run
    assert run.total_tokens == 10, "what follows from lengths is that of the whole batch"
    assert run.shared is not None
    assert run.whole.lengths == packed.lengths
    assert run.whole.shared is None
    assert run.whole is run.whole, "or what is kept with it would be made anew in each layer"
    assert run.whole is not packed, "or each would keep the other alive"
    moved = run.to("meta")
    elsewhere = moved.shared
    assert elsewhere is not None
    places = [elsewhere.position_ids, moved.whole.cu_seqlens, elsewhere.copies.source, elsewhere.copies.first]
    assert {x.device.type for x in (*places, *elsewhere.copies.several[0])} == {"meta"}
    assert packed.shared is None
    known = replace(packed, prefixes=prefixes)
    for same in (pickle.loads(pickle.dumps(known)), known.flattened(), known.bucketed()):
        assert same.prefixes == prefixes

"""Names of blocks: equal only for equal tokens under equal salts, however the chain was extended."""

from hypothesis import given
from hypothesis import strategies as st

from onward.proto.block_hash import BlockHash, block_hashes, extend_block_hashes


def test_hashes_name_full_blocks_only_and_depend_on_all_before() -> None:
    hashes = block_hashes([1, 2, 3, 4, 5], 2, "")
    assert len(hashes) == 2
    assert block_hashes([1, 2, 9, 4], 2, "")[0] == hashes[0]
    assert block_hashes([9, 2, 3, 4], 2, "")[1] != hashes[1]
    assert block_hashes([1, 2, 3, 4], 2, "salt")[0] != hashes[0]


@given(lengths=st.lists(st.integers(0, 8)), block_size=st.integers(1, 4), salt=st.sampled_from(["", "salt"]))
def test_a_chain_that_grows_with_its_tokens_is_the_chain_of_all_of_them(
    lengths: list[int], block_size: int, salt: str
) -> None:
    token_ids: list[int] = []
    grown: list[BlockHash] = []
    for length in lengths:
        token_ids += range(length)
        extend_block_hashes(grown, token_ids, len(token_ids) // block_size, block_size, salt)
    assert grown == block_hashes(token_ids, block_size, salt)

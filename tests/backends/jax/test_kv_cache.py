from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.backends.jax.kv_cache import JaxKVBlock, KVCache, KVCacheArrays, KVCacheShape
from prefixwise.backends.jax.mesh import make_mesh
from prefixwise.contract.errors import BackendError
from prefixwise.forward.tiles import KEY_TILE

# Five pages of two layers, 2 heads of 4.
SHAPE = KVCacheShape.of(num_layers=2, num_tokens=5 * KEY_TILE + 1, heads=(2, 4), dtype=jnp.dtype(jnp.float32))


@pytest.fixture
def kv_cache() -> KVCache:
    return KVCache(make_mesh(jax.devices("cpu"), 1, 2), SHAPE)


def pages_of(blocks: Sequence[JaxKVBlock]) -> set[int]:
    return {block.lease.page for block in blocks}


class TestPages:
    def test_every_block_has_one_of_its_own(self, kv_cache: KVCache) -> None:
        assert (kv_cache.num_pages, len(kv_cache.arrays.keys)) == (5, 2 * 5 * KEY_TILE)
        blocks = kv_cache.take([KEY_TILE, 1, 77])
        assert [block.num_tokens for block in blocks] == [KEY_TILE, 1, 77]
        assert len(pages_of(blocks)) == 3
        assert [kv_cache.address(block) for block in blocks] == [block.lease.page * KEY_TILE for block in blocks]

    def test_it_knows_the_bytes_of_one_on_each_device(self, kv_cache: KVCache) -> None:
        page_bytes = SHAPE.page_bytes(tp_size=2)
        assert page_bytes == 2 * 2 * KEY_TILE * 1 * 4 * 4  # K and V, layers, tokens, heads, H, bytes
        on_each = [shard.data.nbytes for array in kv_cache.arrays for shard in array.addressable_shards]
        assert on_each == [5 * page_bytes // 2] * 4  # of two arrays on two devices

    def test_no_block_takes_nothing(self, kv_cache: KVCache) -> None:
        assert kv_cache.take([]) == []
        assert len(pages_of(kv_cache.take([KEY_TILE] * 5))) == 5

    def test_they_come_back_when_their_blocks_are_dropped(self, kv_cache: KVCache) -> None:
        cached, dropped = kv_cache.take([KEY_TILE] * 2), kv_cache.take([KEY_TILE] * 3)
        freed = pages_of(dropped)
        del dropped
        gc.collect()
        again = kv_cache.take([KEY_TILE] * 3)
        assert pages_of(again) == freed
        assert not freed & pages_of(cached)

    def test_or_when_they_are_released_and_then_once(self, kv_cache: KVCache) -> None:
        blocks = kv_cache.take([KEY_TILE] * 5)
        for block in (*blocks, *blocks):
            block.release()
        again = kv_cache.take([KEY_TILE] * 5)
        del block, blocks
        gc.collect()
        with pytest.raises(BackendError, match="0 of 5 are free"):
            kv_cache.take([1])
        assert len(pages_of(again)) == 5

    def test_a_block_that_was_released_has_no_address(self, kv_cache: KVCache) -> None:
        (block,) = kv_cache.take([1])
        block.release()
        with pytest.raises(BackendError, match="was released before it was read; compute it again"):
            kv_cache.address(block)

    def test_a_full_cache_reports_its_free_pages_and_what_to_do(self, kv_cache: KVCache) -> None:
        held = kv_cache.take([KEY_TILE] * 2)
        with pytest.raises(BackendError) as caught:
            kv_cache.take([KEY_TILE, KEY_TILE, KEY_TILE, 1])
        assert str(caught.value) == (
            f"KV blocks with {3 * KEY_TILE + 1} tokens need 4 pages of {KEY_TILE} tokens, "
            "and 3 of 5 are free; give the KV cache more memory (prefix_cache_bytes), or choose the packed algorithm"
        )
        assert len(pages_of(kv_cache.take([KEY_TILE] * 3))) == 3, "a refusal takes nothing"
        assert len(held) == 2

    def test_even_a_pool_of_no_tokens_has_a_page(self) -> None:
        mesh = make_mesh(jax.devices("cpu"), 1, 1)
        shape = KVCacheShape.of(num_layers=1, num_tokens=0, heads=(1, 4), dtype=jnp.dtype(jnp.float32))
        assert KVCache(mesh, shape).num_pages == 1


class TestRecovery:
    """A program that fails has already consumed the arrays that it was given."""

    @staticmethod
    def lose(kv_cache: KVCache) -> None:
        jax.tree.map(lambda array: array.delete(), kv_cache.arrays)
        kv_cache.recover()

    def test_it_begins_again_with_all_pages(self, kv_cache: KVCache) -> None:
        old = kv_cache.take([KEY_TILE] * 4)
        self.lose(kv_cache)
        assert not kv_cache.arrays.keys.is_deleted()
        new = kv_cache.take([KEY_TILE] * 5)
        del old
        gc.collect()
        with pytest.raises(BackendError, match="0 of 5 are free"):
            kv_cache.take([1])
        assert len({kv_cache.address(block) for block in new}) == 5

    def test_a_page_from_before_is_given_back_to_nobody_even_while_it_begins_again(
        self, kv_cache: KVCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread may drop a block at any moment, also between the new arrays and their new generation."""
        (old,) = kv_cache.take([KEY_TILE])
        reset = kv_cache._reset

        def reset_and_drop() -> None:
            generation, kv_cache.generation = kv_cache.generation, old.generation
            reset()
            old.release()
            kv_cache.generation = generation

        monkeypatch.setattr(kv_cache, "_reset", reset_and_drop)
        self.lose(kv_cache)
        new = kv_cache.take([KEY_TILE] * 5)
        assert len(pages_of(new)) == 5
        with pytest.raises(BackendError, match="0 of 5 are free"):
            kv_cache.take([1])

    def test_a_block_from_before_is_refused(self, kv_cache: KVCache) -> None:
        (old,) = kv_cache.take([1])
        assert kv_cache.address(old) == old.lease.address
        self.lose(kv_cache)
        with pytest.raises(BackendError, match="was lost when a forward pass failed; compute it again"):
            kv_cache.address(old)

    def test_arrays_that_are_there_are_left_alone(self, kv_cache: KVCache) -> None:
        (block,) = kv_cache.take([1])
        arrays: KVCacheArrays = kv_cache.arrays
        kv_cache.recover()
        assert kv_cache.arrays is arrays
        assert kv_cache.address(block) == block.lease.address


@pytest.fixture(scope="module")
def two_pages(scorer_of: Callable[..., Scorer], quick_compilation: None) -> Scorer:
    """Room for 2 x 128 tokens of 2 layers, 2 KV heads of 32, float32."""
    num_bytes = 2 * KEY_TILE * (2 * 2 * 2 * 32 * 4)
    return scorer_of("qwen3", backend="jax", device="cpu", prefix_cache_bytes=num_bytes)


QUERY: list[int] = np.random.default_rng(0).integers(0, 512, 200).tolist()  # two pages
REQUEST: dict[str, Any] = {"label_token_ids": [3, 5], "score_mode": "logit", "algorithm": "prefill_extend"}


class TestInAScorer:
    def test_requests_give_their_pages_back(self, two_pages: Scorer) -> None:
        found = [two_pages.score(QUERY, [[1], [2, 3]], **REQUEST).scores for _ in range(3)]
        assert found[0] == found[1] == found[2]
        assert two_pages.engine.backend.info.max_prefix_len == 2 * KEY_TILE

    def test_a_longer_prefix_is_scored_packed_instead(self, two_pages: Scorer) -> None:
        result = two_pages.score([*QUERY, *QUERY], [[1], [2, 3]], **REQUEST, return_debug=True)
        assert result.debug is not None
        assert result.debug["algorithm"] == "packed"
        assert "caches prefixes of up to 256 tokens, and this one has 400" in str(result.debug["reason"])

    @pytest.mark.parametrize("times", [1, 2])
    def test_a_forward_that_fails_takes_nothing_with_it(
        self, two_pages: Scorer, monkeypatch: pytest.MonkeyPatch, times: int
    ) -> None:
        """It is run again; if that fails, too, the request gets the error, and the next one its scores."""
        expected = two_pages.score(QUERY, [[1]], **REQUEST).scores
        programs = type(two_pages.engine.backend._runner.programs)  # type: ignore[attr-defined]
        trunk, failures = programs.trunk, iter(range(times))

        def failing(self: Any, spec: Any) -> Callable[..., Any]:
            if next(failures, None) is None:
                program: Callable[..., Any] = trunk(self, spec)
                return program

            def fail(weights: object, kv_cache: KVCacheArrays, *inputs: object) -> Any:
                jax.tree.map(lambda array: array.delete(), kv_cache)
                raise RuntimeError("the device fails")

            return fail

        with monkeypatch.context() as patch:
            patch.setattr(programs, "trunk", failing)
            if times == 1:
                assert two_pages.score(QUERY, [[1]], **REQUEST).scores == expected
            else:
                with pytest.raises(RuntimeError, match="the device fails"):
                    two_pages.score(QUERY, [[1]], **REQUEST)
        assert two_pages.score(QUERY, [[1]], **REQUEST).scores == expected

import gzip
import random
import shutil
import subprocess

import pytest
import zstandard

from nemo_like.metrics.compression import measure_compression, measure_gzip, measure_zstd
from nemo_like.testing.world import run_world


def make_texts() -> dict[str, list[bytes]]:
    draw = random.Random(0)
    words = ["the", "mill", "by", "river", "größer", "山", "def", "return"]
    return {
        subset: [" ".join(draw.choices(words, k=300)).encode() for _ in range(num)]
        for subset, num in (("a", 5), ("b", 3), ("c", 1))
    }


def test_gzip_is_what_pythons_gzip_makes_of_the_texts_in_a_row():
    texts = make_texts()["a"]
    assert measure_gzip(texts) == len(gzip.compress(b"".join(texts), 9))


def test_zstd_is_one_frame_of_known_size_with_a_checksum():
    texts = make_texts()["a"]
    options = zstandard.ZstdCompressor(level=19, write_checksum=True)
    assert measure_zstd(texts) == len(options.compress(b"".join(texts)))


@pytest.mark.parametrize(
    ("tool", "measure"), [("gzip -9", measure_gzip), ("zstd -19", measure_zstd)]
)
def test_sizes_are_those_of_the_command_line_tools(tool, measure, tmp_path):
    program, level = tool.split()
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    text = b"".join(make_texts()["a"])
    (tmp_path / "text").write_bytes(text)
    packed = subprocess.run(
        [program, level, "-c", "text"], cwd=tmp_path, capture_output=True, check=True
    )
    # gzip(1) has its own deflate, not zlib's, and notes the file's name.
    assert measure([text]) == pytest.approx(len(packed.stdout), rel=0.02)


def test_each_subset_and_all_together_are_compressed():
    texts = make_texts()
    sizes = measure_compression(texts)
    assert list(sizes) == ["gzip -9", "zstd -19"]
    by_subset, together = sizes["zstd -19"]
    assert by_subset == {subset: measure_zstd(parts) for subset, parts in texts.items()}
    assert together == measure_zstd([*texts["a"], *texts["b"], *texts["c"]])
    assert together < sum(by_subset.values())


def measure_as_rank():
    import torch.distributed as dist

    return measure_compression(make_texts(), rank=dist.get_rank(), world_size=dist.get_world_size())


@pytest.mark.dist
def test_ranks_share_the_work_and_all_know_the_sizes():
    alone = measure_compression(make_texts())
    assert run_world(3, measure_as_rank) == [alone] * 3

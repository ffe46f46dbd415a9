"""Streamed steps: the same global batches on any number of ranks and workers, resumed exactly, in bounded memory."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch
from llama_support.config import Config
from llama_support.data import Data, check_same_data, load_data
from llama_support.encode import Document
from llama_support.errors import BadInput
from llama_support.model import DEBUG_MODEL, load_tokenizer
from llama_support.packing import IGNORED, StepBatches
from llama_support.rows import Row, split_rows
from llama_support.streamed_data import SHARDS_FILE, open_rows
from llama_support.streaming import POOL, LaneParts, StreamedSteps
from llama_support.world import World, start_world

from tests.pool import run_ranks
from tests.recipes.inputs import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13

BATCH = 6
_STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
)
_NUMBER = re.compile(r"<(\d+)>")
ALONE = World(0, 1, torch.device("cpu"), None)


@functools.cache
def _tokenizer() -> Any:
    return load_tokenizer(DEBUG_MODEL)


def _write(folder: Path, count: int = 240, files: int = 5) -> Path:
    """Rows of all three forms and many lengths, each with its number in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = []
        for i in range(number, count, files):
            words = " and".join(f" <{i}>" for _ in range(1 + i * 7 % 11))
            turns = [{"role": role, "content": f"{i}: {words}"} for role in ("user", "assistant") * (1 + i % 2)]
            forms: list[dict[str, Any]] = [
                {"text": words},
                {"prompt": f"{i} is", "completion": words},
                {"messages": turns},
            ]
            lines.append(json.dumps(forms[i % 3]))
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines))
    return folder


def _config(folder: Path, **changes: Any) -> Config:
    values = {"data": str(folder), "sequence_length": 96, "global_batch": BATCH, "micro_batch": 2, "data_workers": 0}
    return Config(**{**values, "output": str(folder.parent / "run"), **changes})


def _load(config: Config, world: World = ALONE) -> Data:
    config.run_folder.mkdir(exist_ok=True)
    return load_data(config, _tokenizer(), 4096, world.rank, world.size)


def _sequences(step: StepBatches) -> torch.Tensor:
    """All that a rank sees of a step: int64, (4, sequences, length)."""
    names = ("input_ids", "labels", "position_ids", "document_ids")
    return torch.stack([torch.cat([batch[name] for batch in step.micro_batches]) for name in names])


def _take(config: Config, count: int, state: dict[str, Any] | None = None) -> tuple[list[torch.Tensor], Any, str]:
    """A rank's part of the next steps, with its trained tokens; the state after them; what became of the rows."""
    world = start_world("cpu") if torch.distributed.is_initialized() else ALONE
    data = _load(config, world)
    check_same_data(data, world)
    if state is not None:
        data.loader.load_state_dict(state)
    steps = data.steps(world)
    taken = []
    for _ in range(count):
        step = next(steps)
        taken.append(_sequences(step))
        trained = torch.tensor(int((taken[-1][1] != IGNORED).sum()))
        if world.size > 1:
            torch.distributed.all_reduce(trained)
        assert int(trained) == step.trained_tokens > 0
    return taken, data.loader.state_dict(), data.progress()


def _whole(ranks: list[Any]) -> list[torch.Tensor]:
    """The global batches of what `_take` gave on each rank, without what fills them up."""
    return [torch.cat(parts, dim=1)[:, :BATCH] for parts in zip(*(rank[0] for rank in ranks))]


@pytest.mark.parametrize(
    "course",
    [((1, 5), (2, 7), (1, 12)), pytest.param(((1, 5), (2, 7), (4, 5), (2, 7)), marks=pytest.mark.full)],
    ids=["1-2-1", "1-2-4-2"],
)
def test_the_same_global_batches_on_other_numbers_of_ranks(tmp_path: Path, course: tuple[tuple[int, int], ...]) -> None:
    config = _config(_write(tmp_path / "data"))
    expected, last, progress = _take(config, 24)
    found, state = [], None
    for world_size, count in course:
        ranks = run_ranks(world_size, _take, config, count, state) if world_size > 1 else [_take(config, count, state)]
        state = ranks[0][1]
        assert all(rank[1] == state for rank in ranks)
        found += _whole(ranks)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert state == last
    assert ranks[0][2] == progress
    assert min(lane[0] for lane in last["lanes"]) > 1.2 * 240  # into the second epoch


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(tmp_path: Path, workers: int) -> None:
    folder = _write(tmp_path / "data")
    expected, last, progress = _take(_config(folder), 8)
    first, state, _ = _take(_config(folder, data_workers=workers), 3)
    rest, found, told = _take(_config(folder, data_workers=workers), 5, state)
    assert all(torch.equal(one, other) for one, other in zip(first + rest, expected, strict=True))
    assert (found, told) == (last, progress)


def _rows_in(documents: Counter[int], step: StepBatches) -> None:
    for sequence in _sequences(step)[0]:
        text = _tokenizer().decode(sequence)
        for part in text.split("<|begin|>")[1:]:
            if numbers := _NUMBER.findall(part):  # none in the unused end, whose token 0 is <|begin|> too
                documents[int(numbers[0])] += 1


def test_an_epoch_holds_every_training_row_once(tmp_path: Path) -> None:
    config = _config(_write(tmp_path / "data"), global_batch=1, micro_batch=1, sequence_length=128)
    data = _load(config)
    rows = open_rows(config.data, 0)
    everything = [rows.row(number) for number in range(len(rows))]
    training, validation = split_rows(everything, config.validation_fraction)
    assert f"training: {len(training)} rows in 5 files" in data.summary
    assert f"validation: {len(validation)} rows" in data.summary
    steps = data.steps(ALONE)
    seen: Counter[int] = Counter()
    while data.loader.state_dict()["lanes"][0][0] < 2 * len(rows):
        _rows_in(seen, next(steps))
    waiting = data.loader.state_dict()["lanes"][0][1:]
    # Two epochs, less what still waits in the pool; the pool may hold rows of the third.
    numbers = {json.dumps([r.text, r.prompt, r.messages]): _number(r) for r in everything}
    expected = Counter({numbers[json.dumps([r.text, r.prompt, r.messages])]: 2 for r in training})
    source = data.loader._source  # type: ignore[union-attr]
    for place in range(2 * len(rows), data.loader.state_dict()["lanes"][0][0]):
        if rows.digest(source.number(place)) >= source.threshold:
            expected[_number(everything[source.number(place)])] += 1
    for place in waiting:
        expected[_number(everything[source.number(place)])] -= 1
    assert seen == expected
    assert seen[_number(validation[0])] == 0


def _number(row: Row) -> int:
    return int(_NUMBER.findall(str(row))[0])


def test_each_epoch_and_each_seed_has_an_order_of_its_own(tmp_path: Path) -> None:
    data = [_load(_config(_write(tmp_path / "data"), seed=seed)) for seed in (0, 1)]
    orders = []
    for one in data:
        assert isinstance(one.loader, StreamedSteps)
        orders += [[one.loader._source.number(epoch * 240 + i) for i in range(240)] for epoch in (0, 1)]
    assert all(sorted(order) == list(range(240)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_no_more_rows_are_held_than_the_pools(tmp_path: Path) -> None:
    config = _config(_write(tmp_path / "data", count=3000), validation_sequences=4, micro_batch=1)
    data = _load(config)
    steps = data.steps(ALONE)
    for _ in range(20):
        step = next(steps)
    gc.collect()
    held = Counter(type(thing) for thing in gc.get_objects() if type(thing) in (Document, Row))
    packed = int(_sequences(step)[3].max()) + 1
    assert held[Row] == 0
    assert BATCH < held[Document] <= BATCH * (POOL + packed) + 1  # and the sample
    assert BATCH * (POOL + packed) < 3000 / 4


def test_packing_leaves_little_unused(tmp_path: Path) -> None:
    taken = _take(_config(_write(tmp_path / "data", count=2000)), 40)[0]
    # The unused end holds zeros, which no document ends with.
    unused = [96 - int(ids.nonzero().max()) - 1 for ids in torch.cat([step[0] for step in taken])]
    assert sum(unused) / (len(unused) * 96) < 0.04


def test_long_rows_are_counted_as_the_run_goes(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    (folder / "part-9.jsonl").write_text("\n".join(json.dumps({"text": f"{i} " * 200}) for i in range(40)))
    for long_rows, told in (("truncate", " truncated)"), ("skip", " longer than the context")):
        config = _config(folder, long_rows=long_rows, output=str(tmp_path / long_rows))
        _, state, progress = _take(config, 12)
        assert told in progress
        assert "epoch 0." in progress or "epoch 1." in progress
        used, truncated, too_long, without_target = state["counts"]
        assert (truncated > 10, too_long > 10) == (long_rows == "truncate", long_rows == "skip")
        assert used > 100
        assert without_target == 0
    config = _config(folder, sequence_length=8, long_rows="skip", output=str(tmp_path / "short"))
    with pytest.raises(BadInput, match=r"none of the .* rows can be used"):
        _take(config, 1)


def _failure(config: Config, other: str = "") -> str:
    """The text of the BadInput that a rank gets for two steps; rank 1 may have other data."""
    if torch.distributed.get_rank() == 1 and other:
        config = Config(**{**vars(config), "data": other})
    template = _tokenizer().chat_template
    _tokenizer().chat_template = _STRICT_TEMPLATE
    try:
        _take(config, 2)
    except BadInput as error:
        return str(error)
    finally:
        _tokenizer().chat_template = template
    return "no error"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_the_template_refuses_ends_every_rank_with_its_line(tmp_path: Path, workers: int) -> None:
    folder = _write(tmp_path / "data")
    lines = (folder / "part-2.jsonl").read_text().splitlines()
    for number in range(0, len(lines), 2):
        lines[number] = json.dumps(
            {"messages": [{"role": role, "content": str(number)} for role in ("alien", "assistant")]}
        )
    (folder / "part-2.jsonl").write_text("\n".join(lines))
    config = _config(folder, data_workers=workers, validation_data=str(folder / "part-0.jsonl"))
    texts = run_ranks(2, _failure, config)
    assert len(set(texts)) == 1
    assert "chat template refuses" in texts[0]
    path, _, rest = texts[0].partition(", line ")
    assert path == str(folder / "part-2.jsonl")
    assert int(rest.partition(":")[0]) % 2 == 1


def test_ranks_that_see_different_shards_are_told_which(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns(".row_index"))
    (other / "part-3.jsonl").write_text((folder / "part-3.jsonl").read_text().replace("<3>", "<4>"))
    texts = run_ranks(2, _failure, _config(folder), other=str(other))
    assert len(set(texts)) == 1
    assert "ranks 0 and 1 have read different data: on rank 1 shard part-3.jsonl has changed" in texts[0]
    (other / "part-3.jsonl").unlink()
    texts = run_ranks(2, _failure, _config(folder), other=str(other))
    assert "on rank 1 shard part-3.jsonl is gone" in texts[0]


def test_a_shard_that_is_gone_during_the_run_is_named(tmp_path: Path) -> None:
    config = _config(_write(tmp_path / "data"), data_workers=1, validation_data=str(_write(tmp_path / "own")))
    data = _load(config)
    (tmp_path / "data" / "part-4.jsonl").unlink()
    with pytest.raises(BadInput, match=r"cannot read on in the data .*part-4\.jsonl"):
        next(data.steps(ALONE))


def test_shards_that_changed_between_two_starts_are_named(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    config = _config(folder)
    fingerprint = _load(config).fingerprint
    (config.run_folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert json.loads((config.run_folder / SHARDS_FILE).read_text())["data"] == str(folder)
    assert _load(config).fingerprint == fingerprint
    text = (folder / "part-1.jsonl").read_text()
    (folder / "part-1.jsonl").write_text(text.replace("<1>", "<2>"))  # as many bytes
    with pytest.raises(BadInput, match=r"shard part-1\.jsonl has changed \(48 rows in"):
        _load(config)
    (folder / "part-1.jsonl").write_text(text)
    assert _load(config).fingerprint == fingerprint
    (folder / "part-8.jsonl").write_text('{"text": "new"}')
    with pytest.raises(BadInput, match=r"shard part-8\.jsonl has come"):
        _load(config)
    assert _load(_config(folder, output=str(tmp_path / "another"))).fingerprint != fingerprint


def test_a_state_of_other_data_or_another_batch_is_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    state = _take(_config(folder), 1)[1]
    with pytest.raises(BadInput, match="in other data"):
        _load(_config(folder, seed=1)).loader.load_state_dict(state)
    with pytest.raises(BadInput, match="give --global-batch 6"):
        _load(_config(folder, global_batch=8)).loader.load_state_dict(state)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    config = _config(_write(tmp_path / "data"))
    config.run_folder.mkdir()
    with pytest.raises(BadInput, match=r"gives token \d+ .* and the model has 600 embeddings"):
        load_data(config, _tokenizer(), 600, 0, 1)


def test_validation_data_may_be_a_folder_or_a_file(tmp_path: Path) -> None:
    folder, own = _write(tmp_path / "data"), _write(tmp_path / "own", count=50, files=2)
    for data in (folder, folder / "part-0.jsonl"):
        for validation, count in ((own, 50), (own / "part-0.jsonl", 25)):
            run = _config(Path(data), validation_data=str(validation), output=str(tmp_path / "run"))
            loaded = _load(run)
            assert f"validation: {count} rows" in loaded.summary
            assert ("streamed" in loaded.summary) == (data == folder)


def test_only_as_many_validation_rows_are_read_as_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_support.streamed_data._FIRST_ROWS", 8)
    folder = _write(tmp_path / "data", count=3000)
    few = _load(_config(folder, validation_sequences=3, validation_fraction=0.3))
    everything = _load(_config(folder, validation_sequences=0, validation_fraction=0.3))
    counts = [int(data.summary.split("validation: ")[1].split()[0]) for data in (few, everything)]
    assert 2 <= counts[0] < 150 < 700 < counts[1] < 1100
    assert ", 3 packed sequences" in few.summary


def test_workers_outlive_any_number_of_signals(tmp_path: Path) -> None:
    steps = _load(_config(_write(tmp_path / "rows"), data_workers=2)).steps(ALONE)
    next(steps)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, number)
        for _ in range(3):  # more than the loader has ready
            next(steps)
    assert all(worker.is_alive() for worker in workers)
    steps.close()  # type: ignore[attr-defined]
    for worker in workers:
        worker.join()


def _stay_in_a_worker(folder: Path) -> None:
    """A rank whose workers leave their ids below `folder` and never give anything."""

    def stay(*_: Any, **__: Any) -> list[int]:
        (folder / str(os.getpid())).touch()
        while True:
            time.sleep(600)

    LaneParts._fill = stay  # type: ignore[method-assign]
    next(_load(_config(folder.parent / "rows", data_workers=2)).steps(ALONE))


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of processes from /proc")
def test_busy_workers_end_with_their_rank(tmp_path: Path) -> None:
    _write(tmp_path / "rows")
    folder = tmp_path / "workers"
    folder.mkdir()
    program = f"import pathlib, tests.recipes.test_streaming as t; t._stay_in_a_worker(pathlib.Path({str(folder)!r}))"
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while len(found := [int(path.name) for path in folder.iterdir()]) < 2:
        assert rank.poll() is None
        time.sleep(0.02)
    for pid in found:
        os.kill(pid, signal.SIGTERM)
    assert not any(_has_ended(pid) for pid in found)
    rank.kill()
    rank.wait()
    while not all(_has_ended(pid) for pid in found):  # or the test's own time limit
        time.sleep(0.02)


def _fail_in_a_worker(folder: Path) -> None:
    """A rank whose worker raises what nobody has foreseen."""
    LaneParts._fill = None  # type: ignore[assignment, method-assign]
    next(_load(_config(folder / "rows", data_workers=1)).steps(ALONE))


@pytest.mark.full
def test_python_ends_after_an_error_in_a_worker(tmp_path: Path) -> None:
    _write(tmp_path / "rows")
    program = f"import pathlib, tests.recipes.test_streaming as t; t._fail_in_a_worker(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "TypeError: 'NoneType' object is not callable" in done.stderr

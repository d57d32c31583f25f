"""Jobs over small Parquet files, driven in this process: plan, made-up results, commit. No Dask, no engine."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.cursors import close_cursors
from batchinfer.data.prepared import read_prepared
from batchinfer.data.segments import ResultRow, SegmentName, compact_unit, write_segment
from batchinfer.job.cleaning import clean_window
from batchinfer.job.commit import commit_chunk, part_summary
from batchinfer.job.ledger import load_window
from batchinfer.job.manifest import freeze_job
from batchinfer.job.planner import prepare_chunk
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.job.units import cut_units
from batchinfer.text import load_tokenizer
from batchinfer.types.request import CompletionOutput
from batchinfer.types.rows import RowError


class Workshop:
    """A folder with an input, an output and the means to run a job over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.input = root / "in"
        self.output = root / "out"
        self.input.mkdir()
        self.ran: list[tuple[str, int]] = []  # (file, row) of each result made

    def write(self, name: str, columns, **options) -> Path:
        path = self.input / name
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, path, **options)
        return path

    def spec(self, *overrides: str, **sections) -> JobSpec:
        data = {
            "name": "test",
            "model": {"path": "fake://hash?max_model_len=256"},
            "input": {"path": "in", "prompt_column": "prompt"},
            "output": {"path": "out"},
            "sampling": {"max_tokens": 8},
        }
        for name, section in sections.items():
            data[name] = {**data.get(name, {}), **section}
        return JobSpec.from_dict(data, base=self.root, overrides=overrides)

    def submit(self, *overrides: str, extend=False, epoch=1, **sections):
        job = freeze_job(resolve_job(self.spec(*overrides, **sections), extend=extend))
        self.run(job, epoch=epoch)
        return job

    def run(self, job, *, epoch=1, answer=None, windows=None, clean=True):
        """Plans, answers and commits what is not out yet. `answer(text, file, row)` gives a text or a RowError."""
        for window in job.windows() if windows is None else windows:
            todo = [chunk for chunk in window.chunks if part_summary(job, chunk) is None]
            if not todo:
                continue
            plan = load_window(job.layout, window.window) or self.plan(job, window.window, todo, epoch)
            self.answer(job, plan, answer, epoch)
            for chunk in todo:
                commit_chunk(job, plan, chunk, epoch=epoch)
            if clean:
                clean_window(job.layout, window.window)

    def plan(self, job, window, chunks, epoch=1):
        summaries = [prepare_chunk(job, window, chunk, epoch=epoch) for chunk in chunks]
        return cut_units(job, window, summaries, epoch=epoch)

    def answer(self, job, plan, answer=None, epoch=1):
        from batchinfer.modelfiles import open_model

        layout = job.layout
        tokenizer = load_tokenizer(open_model("fake://hash").tokenizer)
        files = {chunk.chunk: chunk.file for window in job.windows() for chunk in window.chunks}
        for unit in plan.units:
            rows = read_prepared(layout.prepared_unit(plan.window, plan.epoch, unit.unit))
            results = []
            for i in range(len(rows)):
                chunk, row = int(rows.chunks[i]), int(rows.rows[i])
                prompt = tokenizer.decode(rows.token_ids(i).tolist(), skip_special_tokens=True)
                name = job.file_name(files[chunk])
                said = f"echo {prompt}" if answer is None else answer(prompt, name, row)
                self.ran.append((name, row))
                made = {"chunk": chunk, "row": row, "prompt_tokens": len(rows.token_ids(i)), "cached_tokens": 1}
                if isinstance(said, RowError):
                    results.append(ResultRow(**made, error=said))
                else:
                    sampling = job.sampling_of(rows.params_of(i))
                    results.append(ResultRow(**made, outputs=[sample(k, said) for k in range(sampling.n)]))
            segment = layout.segments(plan.window) / str(SegmentName(unit.unit, epoch, 1, 1))
            write_segment(segment, results)
            compact_unit([segment], layout.unit_results(plan.window, unit.unit))

    def parts(self) -> list[Path]:
        return sorted(self.output.glob("part-*.parquet"))

    def read(self) -> list[dict]:
        return [row for path in self.parts() for row in pq.read_table(path).to_pylist()]


def sample(index: int, text: str) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=(5, 6, 7), finish_reason="stop")


@pytest.fixture(autouse=True)
def no_open_inputs():
    """Readers that planning keeps for the next slice are closed with the test."""
    yield
    close_cursors()


@pytest.fixture
def shop(tmp_path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture(scope="session")
def new_shop(tmp_path_factory):
    """Makes a workshop of its own at each call, for properties that are tried on many inputs."""
    return lambda: Workshop(tmp_path_factory.mktemp("shop"))

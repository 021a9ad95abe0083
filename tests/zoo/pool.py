"""``rows``: judge many classes in worker processes; a crash or a hang becomes a row and not the end."""

import dataclasses
import logging
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tests.zoo.judge import Row, judge

_CONTEXT = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class _Worker:
    """A process that judges one class after another; ``name`` is the one it is at."""

    process: BaseProcess
    pipe: Connection
    name: str = ""

    @classmethod
    def start(cls, path: str) -> "_Worker":
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_work, args=(theirs, path), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def take(self, name: str) -> None:
        self.name = name
        self.pipe.send(name)

    def answer(self, path: str) -> Row:
        try:
            row: Row = self.pipe.recv()
        except EOFError:
            self.process.join()
            return Row(self.name, path, "WRONG", reason=f"the process ended with code {self.process.exitcode}")
        return row

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def rows(names: Iterable[str], path: str, jobs: int, timeout: float) -> Iterator[Row]:
    """The rows of these classes, in the order in which they come.

    Args:
        jobs: worker processes.
        timeout: seconds without any answer after which all workers count as hanging.
    """
    waiting = list(names)[::-1]
    workers: list[_Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(_Worker.start(path))
            workers[-1].take(waiting.pop())
        ready = wait([worker.pipe for worker in workers], timeout)
        for worker in list(workers):
            if not ready:
                worker.stop()
                yield Row(worker.name, path, "WRONG", reason=f"no answer came within {timeout:.0f} seconds")
            elif worker.pipe in ready:
                yield worker.answer(path)
            else:
                continue
            if waiting and worker.process.is_alive():
                worker.take(waiting.pop())
            else:
                worker.stop()
                workers.remove(worker)


def _work(pipe: Connection, path: str) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("kitty_compile").setLevel(logging.ERROR)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(name, path))

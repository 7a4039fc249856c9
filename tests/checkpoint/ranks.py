"""The run's :class:`Checkpointer` where ranks share a process group: rank 0 drives it, the others answer its calls."""

from __future__ import annotations


class GroupRanks:
    """A role whose ranks are those of the default process group: what ``WorkerGroup`` is under Ray.

    ``state``: a ``RankState``, or a function that returns it.
    """

    def __init__(self, state, seed, role="policy"):
        from skyrl_megatron.runtime.checkpoint.rank_files import RankWriter

        self._state, self.seed, self.role, self.writer = state, seed, role, RankWriter()

    @property
    def state(self):
        return self._state() if callable(self._state) else self._state

    @property
    def world_size(self):
        import torch.distributed as dist

        return dist.get_world_size()

    def save_checkpoint(self, folder, step, *, background):
        self._call("write", folder, step, background)

    def wait_checkpoint(self):
        self._call("wait")

    def load_checkpoint(self, folder):
        return self._call("read", folder)

    def _call(self, *call):
        """On rank 0: run ``call`` on every rank."""
        broadcast((self.role, *call))
        return self.run(*call)

    def run(self, method, *arguments):
        """This rank's part of a call; a rank's failure is raised on all."""
        from skyrl_megatron.runtime.checkpoint.rank_files import run_on_all_ranks

        return run_on_all_ranks(lambda: getattr(self, f"_{method}")(*arguments))[0]

    def _write(self, folder, step, background):
        self.writer.write(folder, self.role, step, self.state, background=background)

    def _wait(self):
        self.writer.wait(60)

    def _read(self, folder):
        from skyrl_megatron.runtime.checkpoint.rank_files import read_rank

        return read_rank(folder, self.role, self.state, seed=self.seed)


class RankCheckpointer:
    """``Checkpointer`` whose ranks share a process group; every rank calls every method and gets what rank 0 got.

    ``state``: that of the policy, or role → state of each.
    """

    def __init__(self, root, state, *, seed=42, **options):
        from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer

        states = state if isinstance(state, dict) else {"policy": state}
        self.roles = {role: GroupRanks(each, seed, role) for role, each in states.items()}
        self.driven = Checkpointer(root, self.roles, **options)
        self.store = self.driven.store

    def save(self, step, data=None, trainer_state=None):
        return self._drive(lambda: self.driven.save(step, data or {}, trainer_state or {}))

    def load(self, mode="latest", path=None):
        return self._drive(lambda: self.driven.load(mode, path))

    def finish(self):
        self._drive(self.driven.finish)

    def close(self):
        self._drive(self.driven.close)

    def _drive(self, work):
        import torch.distributed as dist

        from skyrl_megatron.errors import CheckpointError

        if dist.get_rank() == 0:
            try:
                result, failure = work(), None
            except CheckpointError as error:
                result, failure = None, error
            broadcast(("return", result, failure))
        else:
            while (call := broadcast(None))[0] != "return":
                try:
                    self.roles[call[0]].run(*call[1:])
                except CheckpointError:
                    pass  # rank 0 has it too, and decides
            _, result, failure = call
        if failure is not None:
            raise failure
        return result


def broadcast(value):
    """Rank 0's ``value``, on every rank."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def newest(store):
    """The newest complete checkpoint, every byte compared with its hashes; None when there is none."""
    found = next(store.candidates(), None)
    return found and store.verify(found.folder)

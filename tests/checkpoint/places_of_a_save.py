"""Named places in a save, where a test may end the process.

``before data`` · ``between shards`` · ``before manifest`` · ``before rename`` · ``before pointer`` · ``during prune``
"""

from collections.abc import Callable


def watch(reached: Callable[[str], None]) -> None:
    """Call ``reached`` with the name of each place, from now on in this process, whose saves go to local folders."""
    from skyrl_megatron.runtime.checkpoint import store
    from skyrl_megatron.runtime.checkpoint.manifest import MANIFEST
    from skyrl_megatron.runtime.checkpoint.rank_files import ChunkFile
    from skyrl_megatron.runtime.checkpoint.storage import LocalStorage

    create, append, write, rename = LocalStorage.create, ChunkFile.append, LocalStorage.write, LocalStorage.rename

    def created(self, path):
        if path.endswith(".distcp"):
            reached("before data")
        return create(self, path)

    def appended(self, *args, **kwargs):
        append(self, *args, **kwargs)
        reached("between shards")

    def written(self, path, data):
        name = path.rsplit("/", 1)[-1]
        if name == MANIFEST:
            reached("before manifest")
        elif name == store.POINTER:
            reached("before pointer")
        write(self, path, data)
        if name == MANIFEST:
            reached("before rename")

    def renamed(self, old, new):
        rename(self, old, new)
        if new.endswith(store._REMOVED):
            reached("during prune")

    LocalStorage.create, LocalStorage.write, LocalStorage.rename = created, written, renamed
    ChunkFile.append = appended

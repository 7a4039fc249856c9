"""Worker extension: what an engine drafts with, and which tokens it drafted."""

from __future__ import annotations

import hashlib
from typing import Any

from skyrl_megatron.inference.vllm.compat import WorkerExtension, layer_weights


class DraftExtension(WorkerExtension):
    """Methods that tests ask for by ``collective_rpc``."""

    def draft_weights(self) -> tuple[dict[str, str], list[bool]]:
        """Digests of the draft model's tensors as its kernels have them, by name, and whether embedding and output
        layer are the target's own."""
        worker: Any = self
        draft, target = worker.get_draft_model(), worker.get_model()
        ((number, layer),) = draft.model.layers.items()
        same = [draft.model.embed_tokens is target.model.embed_tokens, layer.shared_head.head is target.lm_head]
        found = {
            name: hashlib.sha256(data).hexdigest()
            for each in (None, int(number))
            for name, _, data in layer_weights(draft, each)
        }
        return found, same

    def drafted_tokens(self) -> list[list[list[int]]]:
        """Tokens [step][request][drafted] since the last call, which are noted from the first on."""
        worker: Any = self
        drafter = worker.model_runner.drafter
        if not hasattr(self, "drafted_here"):
            self.drafted_here: list[Any] = []
            propose = drafter.propose

            def noted(*arguments: Any, **options: Any) -> Any:
                tokens = propose(*arguments, **options)
                self.drafted_here.append(tokens.tolist())
                return tokens

            drafter.propose = noted
        taken, self.drafted_here = self.drafted_here, []
        return taken

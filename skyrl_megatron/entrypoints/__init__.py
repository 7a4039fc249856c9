"""The commands, and the experiment that they run."""

from skyrl_megatron.interrupts import end_while_importing

end_while_importing()

import skyrl_megatron.workers as _before_ray  # noqa: E402, F401 - token and address before any import of Ray

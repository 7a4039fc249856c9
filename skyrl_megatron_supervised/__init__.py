"""Training on rows of data: conversations, preferences and scores."""

from skyrl_megatron.plugins import register_option

register_option(
    "--show-row",
    "skyrl_megatron_supervised.show_row:run",
    value="N",
    help="print row N of data.train_data as it is rendered; sft, dpo and reward mark what is trained; --json",
)

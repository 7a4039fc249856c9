"""Every command of the documents: the test that runs it, or what it needs that a test does not have.

A command is that of the first row whose pattern it matches from its first character on. Where a row names a test, that
test runs the command, or what the command runs, with its own sizes and folders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HERE = "tests/guides/test_commands.py::"
GPUS, CLUSTER, DOCKER = "GPUs", "a cluster", "a container engine"
GREEN = "tests/guides/test_shells.py::test_a_command_for_gpus_is_green_on_the_machines_that_its_page_names"
RUNS_THE_SUITE = "the suite itself: a test of the suite cannot run it"


@dataclass(frozen=True)
class Row:
    """What a command is."""

    pattern: str
    test: str = ""
    """``FILE::TEST``."""
    needs: str = ""
    """What the command needs that no test has, where none runs it."""

    def matches(self, command: str) -> bool:
        return re.match(self.pattern, command) is not None


VERB = r"(\.venv/bin/)?skyrl-megatron "
MAIN = r"(\.venv/bin/)?python -m skyrl_megatron\."
RUN = r"launch/run_moe\.sh"
COMMANDS = (
    # from nothing to a run
    Row(
        r"launch/setup\.sh$",
        "tests/launch/test_setup.py::test_the_last_line_says_what_is_where_and_what_comes_next",
    ),
    Row(r"source \.venv/bin/activate", needs="a shell that stays open"),
    Row(r"launch/setup\.sh cpu", "tests/guides/test_documents.py::test_local_commands_run"),
    Row(r"launch/setup\.sh ci", needs="root, to install packages of the system"),
    Row(r"launch/doctor\.sh --cpu", "tests/guides/test_documents.py::test_local_commands_run"),
    Row(rf"{VERB}doctor|launch/doctor\.sh$", "tests/tools/test_screen.py::test_this_machine_and_the_self_test"),
    Row(r"launch/gpu_hour\.sh", needs=GPUS),
    Row(r"launch/gpu_rehearsal\.sh", needs="packages of 5 GB and a quarter of an hour"),
    Row(rf"{RUN}$", "tests/job/test_learning.py::test_rewards_teach"),
    # checks: what is checked of a run is all that depends on its command
    Row(rf"{RUN} --check( trainer\.seed=1 .*)?$", "tests/guides/test_documents.py::test_local_commands_run"),
    Row(rf"{VERB}(check|train --check=1x8 .*) model=", HERE + "test_a_check_of_the_guides_finds_nothing"),
    Row(rf"{VERB}check --gpu", "tests/launch/test_run_moe.py::test_check_for_another_machine_with_every_form"),
    # runs
    Row(rf"{RUN} (\[key=value …\]|…)$", "tests/launch/test_run_moe.py::test_help_is_true"),
    Row(
        rf"{RUN} --recipe (embedded-|NAME)",
        "tests/launch/test_run_moe.py::test_check_for_another_machine_with_every_form",
    ),
    Row(
        rf"{VERB}train --recipe tiny-moe-cpu",
        "tests/job/test_tiny_recipe.py::test_a_tiny_moe_takes_steps_on_its_own_data",
    ),
    Row(rf"({VERB}(train|sft|dpo)|docker run .*|{RUN}( --hosts .*| --check=4x8 .*)) --recipe qwen3-30b-a3b", GREEN),
    Row(rf"{VERB}reward model=|python launch/examples/gsm8k\.py --config launch/recipes/olmoe", GREEN),
    Row(rf"{VERB}train --recipe NAME", "tests/config/test_recipes.py::test_recipe_fits_with_room"),
    Row(
        rf"{VERB}train --config launch/examples/tiny\.yaml trainer\.plugins",
        "tests/examples/test_runs.py::test_the_agent_of_the_guide_is_trained",
    ),
    Row(rf"{VERB}train --config launch/examples/", "tests/examples/test_runs.py::test_an_example_runs"),
    Row(r"python launch/examples/\S+ (--\S+ \S+ )*--config", "tests/examples/test_runs.py::test_an_example_runs"),
    Row(
        r"python launch/examples/tiny_repos/train\.py", "tests/examples/test_tiny_repos.py::test_the_agent_is_trained"
    ),
    Row(
        r"python launch/examples/sft_grpo_dpo/run\.py",
        "tests/examples/test_sft_grpo_dpo.py::test_a_model_passes_through_all_stages",
    ),
    Row(r"python launch/examples/tiny\.py", "tests/examples/test_runs.py::taught"),
    Row(r"python train_letters\.py", "tests/plugins/test_plugins.py::test_the_script_of_the_trainer_guide_runs"),
    Row(rf"{MAIN}entrypoints\.main_base", GREEN),
    Row(rf"{VERB}train$", "tests/launch/test_wheel.py::test_the_embedded_run_and_what_is_done_with_it"),
    Row(rf"{VERB}examples$", "tests/launch/test_wheel.py::test_the_examples_are_written"),
    Row(rf"{VERB}one-step", "tests/tools/test_one_step.py::test_prompts_to_synced_weights"),
    Row(
        rf"{RUN} trainer\.healing",
        "tests/faults/test_recovery.py::test_lost_ranks_are_replaced_and_the_numbers_are_those_of_no_fault",
    ),
    Row(rf"{VERB}serve-engine", "tests/tools/test_fleet.py::test_an_engine_over_several_hosts"),
    # after a run
    Row(r"skyrl-megatron evaluate", "tests/job/test_evaluate.py::test_a_model_is_evaluated_without_places_for_ranks"),
    Row(r"skyrl-megatron replay-batch", "tests/tools/test_replay_batch.py::test_a_step_is_trained_again"),
    Row(r"skyrl-megatron (--help|\{|(sft|dpo|reward) --help)", HERE + "test_a_quick_command_runs"),
    Row(r"skyrl-megatron sft --show-row", "tests/supervised/test_show_row.py::test_the_text_marks_what_is_trained"),
    Row(r"skyrl-megatron reward$", "tests/supervised/test_reward.py::test_a_reward_model_is_trained"),
    Row(r"curl http://127", "tests/agents/test_http_endpoint.py::test_the_openai_package_talks_to_the_endpoint"),
    Row(rf"{VERB}dashboard", "tests/observe/test_server.py::test_what_is_new_is_given"),
    Row(rf"{VERB}compare", "tests/observe/test_compare.py::test_exit_codes"),
    Row(rf"{VERB}diagnose", "tests/observe/test_diagnose.py::test_processes_of_a_run_are_told_with_stack_and_log"),
    Row(rf"{VERB}explain-mismatch", "tests/tools/test_explain_mismatch.py::test_an_engine_with_a_wrong_weight"),
    # data, models
    Row(rf"{VERB}prepare gsm8k", "tests/prompts/test_prompts.py::test_gsm8k_from_its_files"),
    Row(
        rf"{VERB}prepare multiply",
        "tests/prompts/test_prompts.py::test_arithmetic_is_right_distinct_and_held_out",
    ),
    Row(r"HF_HOME=\S+ (hf download|HF_HUB_OFFLINE=1)", HERE + "test_what_was_fetched_is_enough_without_a_network"),
    Row(r"skyrl-megatron convert list", HERE + "test_a_quick_command_runs"),
    Row(r"skyrl-megatron convert inspect", "tests/bridges/test_cli.py::test_inspect_counts_parameters"),
    Row(r"skyrl-megatron convert import", "tests/bridges/test_cli.py::test_from_hf_to_megatron_and_back"),
    Row(r"skyrl-megatron convert merge", "tests/lora/test_folders.py::test_merged"),
    Row(r"skyrl-megatron convert", "tests/job/test_run.py::test_the_printed_checkpoint_is_converted_as_it_is"),
    # clusters, images
    Row(r"sbatch", "tests/tools/cluster/test_batch_script.py::test_a_task_on_each_host"),
    Row(r"(eval )?\S*launch/ray_cluster\.sh", "tests/tools/cluster/test_cluster.py::test_up_join_and_down"),
    Row(r"ray (status|stop)", needs=CLUSTER),
    Row(r"docker/build\.sh --help", HERE + "test_a_quick_command_runs"),
    Row(r"docker/build\.sh", "tests/launch/test_images.py::test_build_asks_the_engine"),
    Row(r"docker (run|compose)", needs=DOCKER),
    # work on the project
    Row(r"launch/run_tests\.sh|SKYRL_TWO_HOSTS=1 launch/run_tests\.sh", needs=RUNS_THE_SUITE),
    Row(r"\.ci/run", "tests/launch/test_ci.py::test_every_part_has_a_test_here"),
    Row(r"\.venv/bin/python -m tests\.mutations", "tests/mutations/test_mutations.py::test_it_is_caught"),
    Row(r"pre-commit install", needs="pre-commit, which is no package of the project"),
    Row(r"python benchmarks/run\.py", "tests/launch/test_benchmarks.py::test_the_front_lists_them_and_refuses_others"),
    Row(r"launch/docs\.sh", "tests/launch/test_ci.py::test_documentation_part"),
    Row(r"launch/requirements/(environments|lint|trackers|lock)\.sh", needs="a package index"),
    Row(r"\.venv/tools/bin/uv build", "tests/launch/test_wheel.py::test_the_archives_have_what_is_in_git"),
    Row(r"\.venv/bin/python launch/requirements/check\.py", HERE + "test_a_quick_command_runs"),
    Row(
        rf"{MAIN}config\.document", "tests/config/test_fields.py::test_every_field_is_explained_and_config_md_is_fresh"
    ),
    Row(rf"{MAIN}config\.metric_table", "tests/observe/test_reading.py::test_metric_names_of_runs_are_in_the_table"),
)

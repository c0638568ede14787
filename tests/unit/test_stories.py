"""What envforge exists for, line by line: what people see, what the tool does about it, and the tests of that.

The lines are the remedies of three kinds of failure (a training that dies with "unknown error", an environment that is
wrong rather than the data, a model that breaks after merging). Here only the names are checked: a test that is renamed
or removed leaves a remedy without proof, and that fails. Names: `folder/file.py::function`, or `cases/file.yaml::id`.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ENV, POLICY, SUP = "unit/test_verify_environment.py", "unit/test_verify_policy.py", "unit/test_verify_supervise.py"
APP, CLI, DIST = "unit/test_verify_app.py", "unit/test_verify_cli.py", "unit/test_verify_distributed.py"
LAYERS, STEPS = "model/test_proof_layers.py", "model/test_proof_training.py"
EFFECT, REAL = "model/test_proof_effect.py", "model/test_proof_real.py"
TRAINING, DRIVER, GPU = "cases/diagnose/training.yaml", "cases/diagnose/driver.yaml", "cases/diagnose/gpu.yaml"
PACKAGES = "cases/diagnose/packages.yaml"

STORIES = {
    # 1. training dies with "CUDA error: unknown error"
    "lengths of the user's data: median, 95th percentile, longest, suggested cap": [
        f"{POLICY}::test_length_report_of_long_articles",
        f"{LAYERS}::test_own_data_is_measured",
        f"{LAYERS}::test_plain_text_is_read_by_paragraphs",
        f"{LAYERS}::test_own_data_that_cannot_be_read",
    ],
    "truncation on, cap 1024 by default, padded to a multiple of 8": [
        f"{POLICY}::test_the_stories_defaults",
        f"{LAYERS}::test_data_passes",
        f"{LAYERS}::test_each_rule_for_a_batch",
    ],
    "a cap above what fits is refused, one above 2048 is a warning": [
        f"{LAYERS}::test_cap_above_the_positions",
        f"{ENV}::test_memory_below_the_estimate_fails",
        f"{LAYERS}::test_cap_above_2048_is_a_warning",
    ],
    "a text of 5,000 tokens really comes out cut": [
        f"{LAYERS}::test_a_collator_that_does_not_cut",
        f"{REAL}::test_the_policy_on_the_real_tokenizer",
    ],
    "the failing stage runs again in a fresh process with CUDA_LAUNCH_BLOCKING=1, both errors are kept": [
        f"{SUP}::test_with_a_gpu_every_failure_is_run_again_with_launch_blocking",
        f"{SUP}::test_a_failure_that_does_not_repeat_stays_a_failure",
        f"{SUP}::test_a_crash_is_a_finding_and_names_the_check_it_died_in",
    ],
    "the true error goes to the diagnosis": [
        f"{CLI}::test_the_log_of_a_failure_is_diagnosed_into_the_receipt",
        f"{DRIVER}::cuda-unknown-error",
        f"{TRAINING}::device-assert-embedding-index",
    ],
    "driver against torch's CUDA; the fix is a torch build for an older CUDA, or a newer driver": [
        f"{ENV}::test_driver_floor",
        f"{DRIVER}::driver-too-old",
    ],
    "left-over processes with pid, user, age, memory; told, never ended": [
        f"{ENV}::test_left_over_processes_are_told_with_pid_and_age",
        f"{ENV}::test_nvidia_smi_rows_become_processes",
        f"{TRAINING}::oom-other-process",
        "unit/test_diagnose_rules.py::test_fixes_keep_their_manners",
    ],
    "the policy as an object for one's own script: length, batch, accumulation, precision with its reason, clipping": [
        f"{POLICY}::test_the_stories_defaults",
        f"{POLICY}::test_precision_follows_the_gpu",
        f"{REAL}::test_training_arguments_are_what_the_installed_release_takes",
    ],
    "labels from the truncated ids": [
        f"{LAYERS}::test_each_rule_for_a_batch",
        f"{LAYERS}::test_padding_with_the_end_token_keeps_the_real_one",
    ],
    "a precheck before any step: CUDA, device name, free MiB against a threshold": [
        f"{POLICY}::test_the_precheck_tells_name_and_free_memory",
        f"{POLICY}::test_the_precheck_stops_before_anything_is_spent",
        f"{REAL}::test_the_precheck_says_why_it_stops",
    ],
    # 2. errors that come from the environment
    "environment, data, training, effect in this order; the first that fails is named": [
        f"{SUP}::test_what_follows_a_failure_is_left_out_or_gets_a_fresh_process",
        f"{APP}::test_a_missing_pin_fails_the_environment_layer_and_writes_the_receipt",
    ],
    "which python and prefix runs": [f"{ENV}::test_a_foreign_environment_is_told"],
    "a GPU environment that ends on the CPU fails": [
        f"{ENV}::test_device",
        f"{ENV}::test_cpu_build_in_place_of_the_plans_cuda_build_fails_and_shows_both",
        f"{REAL}::test_a_gpu_plan_on_the_cpu_does_not_pass_in_full",
        f"{PACKAGES}::cpu-only-torch",
    ],
    "the framework's own check is recorded": [f"{ENV}::test_what_unsloth_says_of_itself_is_recorded"],
    "all tensors on one device, the odd one named": [
        f"{STEPS}::test_odd_device_and_dtype_are_named",
        f"{LAYERS}::test_a_tensor_on_another_device",
        f"{TRAINING}::device-mismatch",
    ],
    "out of memory: reserved against allocated, largest free block, capacity or pieces; advice": [
        f"{ENV}::test_out_of_memory_is_told_by_its_numbers",
        f"{ENV}::test_out_of_memory_fails_the_check_and_keeps_the_error",
        f"{TRAINING}::oom-capacity",
        f"{TRAINING}::oom-fragmentation",
    ],
    "input_ids are integer tensors, not text or ragged lists; raw columns are left out": [
        f"{POLICY}::test_what_is_no_tokenized_input_is_named",
        f"{STEPS}::test_other_columns_do_not_reach_the_model",
        f"{TRAINING}::invalid-tokenized-input",
    ],
    "one Triton kernel compiles and runs": [
        f"{ENV}::test_triton_kernel_is_launched_and_its_result_looked_at",
        f"{ENV}::test_triton_without_a_compiler",
        f"{GPU}::triton-driver-or-ptxas-mismatch",
    ],
    "a variable that does not exist is never advised": ["unit/test_diagnose_rules.py::test_fixes_keep_their_manners"],
    "a loss or a gradient that is no number: which of the two, first step and batch, why, what to try": [
        f"{STEPS}::test_nan_in_the_weights_names_the_first",
        f"{STEPS}::test_a_gradient_norm_that_is_none_is_told_from_a_loss_that_is_none",
        f"{STEPS}::test_why_a_loss_is_no_number",
        f"{STEPS}::test_a_batch_without_anything_to_predict",
        f"{STEPS}::test_a_rate_that_blows_up_gives_advice",
        f"{TRAINING}::nan-loss",
        f"{TRAINING}::nan-grad-fp16",
    ],
    "adapters move: lora_B and lora_A above a floor, something trainable, alpha and r sane": [
        f"{STEPS}::test_adapters_that_get_no_gradient",
        f"{STEPS}::test_adapters_of_which_only_a_is_stuck",
        f"{STEPS}::test_everything_frozen",
        f"{STEPS}::test_frozen_adapters_with_something_else_trainable",
        f"{TRAINING}::lora-not-training",
    ],
    "memory after collection stays flat, else what holds it is named": [
        f"{STEPS}::test_memory_that_grows_is_named",
        f"{TRAINING}::memory-creep",
    ],
    "number formats of trainable and frozen weights; float32 adapters are normal": [
        f"{STEPS}::test_odd_device_and_dtype_are_named",
        f"{STEPS}::test_training_then_effect_pass",
        f"{TRAINING}::dtype-mismatch",
    ],
    # 3. a device-side assert after merging
    "one matching set; driver, toolkit and torch's CUDA side by side": [
        f"{ENV}::test_driver_floor",
        f"{PACKAGES}::toolkit-torch-major-mismatch",
        "cases/resolve/trainers.yaml::xtuner-of-its-time",
    ],
    "a fresh environment, pinned, everything of one time": [
        f"{ENV}::test_pins_pass_and_the_local_part_does_not_matter",
        f"{ENV}::test_lock_lines",
        "cases/resolve/trainers.yaml::xtuner-of-its-time",
    ],
    "after the merge: vocabulary, positions, rotary settings, number format are the base's": [
        f"{EFFECT}::test_a_damaged_configuration",
        f"{EFFECT}::test_merged_weights_in_another_format",
    ],
    "reloaded from disk the logits agree": [
        f"{EFFECT}::test_merged_weights_damaged_on_disk",
        f"{EFFECT}::test_a_merge_that_does_nothing",
        f"{EFFECT}::test_an_adapter_without_effect",
        f"{STEPS}::test_a_base_that_training_changed_is_seen",
    ],
    "positions and token ids stay below the model's limits": [
        f"{LAYERS}::test_an_answer_beyond_the_positions",
        f"{LAYERS}::test_vocabulary_larger_than_the_embedding",
        f"{TRAINING}::device-assert-position-index",
    ],
    "the base model chats first, then training, then merging, then chat": [
        f"{REAL}::test_the_small_model_chats_trains_and_keeps_it",
        f"{LAYERS}::test_chat_passes",
    ],
    "a 4-bit chat as a check of its own": [
        f"{LAYERS}::test_four_bits",
        f"{LAYERS}::test_four_bits_that_are_none",
    ],
    "remote code only where it is allowed, from a pinned revision, with transformers below 4.50": [
        f"{APP}::test_bad_usage_is_exit_2",
        f"{LAYERS}::test_a_model_without_generate_names_the_remote_code",
        "unit/test_matrix_data.py::test_internlm2_remote_code",
        f"{PACKAGES}::remote-code-vs-transformers",
    ],
    "logs and versions are kept with every run, fit to be sent": [
        f"{CLI}::test_the_real_proof_through_the_command",
        "unit/test_verify_page.py::test_folders_and_the_name_of_this_machine_are_words",
    ],
    # several processes
    "several processes: one shared step, the sum's time, the way it takes; TCP beside InfiniBand fails": [
        f"{EFFECT}::test_two_real_ranks_over_gloo",
        f"{DIST}::test_tcp_where_infiniband_is_there_fails",
        f"{DIST}::test_a_rank_that_is_killed_ends_the_others_and_is_named",
        f"{DIST}::test_a_rank_that_hangs_is_named_with_its_phase",
    ],
    # what reports of others demand of the proof
    "a checkpoint is saved and resumed from once": [
        f"{STEPS}::test_training_then_effect_pass",
        f"{STEPS}::test_a_checkpoint_that_cannot_be_read_back",
        f"{PACKAGES}::torch-load-guard",
    ],
    "torch's own CUDA is compared, not its public version": [f"{ENV}::test_torch_build"],
    "caches that this user cannot write are one clear message": [
        f"{ENV}::test_caches_that_cannot_be_written",
        "unit/test_render.py::test_what_every_dockerfile_keeps_to",
        "engine/test_supply.py::test_a_read_only_root_with_mounted_caches_works",
    ],
}


@cache
def names(file: str) -> frozenset[str]:
    """Test functions of a module, or ids of a case file."""
    text = (TESTS / file).read_text(encoding="utf-8")
    if file.endswith(".yaml"):
        return frozenset(re.findall(r"\bid: ([\w-]+)", text))
    return frozenset(node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("remedy", STORIES)
def test_each_remedy_has_its_tests(remedy: str) -> None:
    assert STORIES[remedy]
    missing = [name for name in STORIES[remedy] if name.partition("::")[2] not in names(name.partition("::")[0])]
    assert missing == []

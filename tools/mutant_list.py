"""Fifty faults for the test suite to find: small replacements in the sources, each of which breaks one property.

``mutants.py`` applies them one at a time and runs tests. A mutant is a replacement of text rather than a line number,
so that it survives changes elsewhere in its file; ``tests/unit/test_mutants.py`` fails when a text is gone.

A good mutant breaks one property, imports and compiles, and leaves most of the suite green. One that changes no
behavior, or that any test notices, says nothing about the tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault: one replacement in one source file.

    Attributes:
        name: short, in kebab case.
        file: relative to ``src/outofcore``.
        old: occurs exactly once in the file.
        new: takes its place.
        breaks: what goes wrong, in one sentence.
        tests: files or node ids that should fail, the cheapest and sharpest first; at most four.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


MUTANTS = (
    # Lowering and analysis
    Mutant(
        "copy-in-before-copy-out",
        "lowering/waits.py",
        "needed = _later(needed, slot_written.get((storage, instruction.home), nothing))",
        "needed = _later(needed, nothing)",
        "A copy in does not wait for the copy out that fills its home slot.",
        ("tests/unit/test_lowering.py", "tests/unit/test_planning_properties.py", "tests/unit/test_several_homes.py"),
    ),
    Mutant(
        "update-before-collectives-end",
        "lowering/waits.py",
        "queue != collectives and _is_final(graph, program, instruction):",
        "queue == collectives and _is_final(graph, program, instruction):",
        "An update of a parameter does not wait for collectives that may still fail.",
        ("tests/unit/test_collectives.py",),
    ),
    Mutant(
        "home-slot-freed-one-copy-early",
        "lowering/slots.py",
        "coming[home].append((arrived[home], slot))",
        "coming[home].append((arrived[home] - 1, slot))",
        "A home slot is reused while its last copy in is still running.",
        ("tests/unit/test_slots.py", "tests/unit/test_several_homes.py"),
    ),
    Mutant(
        "overwrite-makes-no-version",
        "analysis/recipes.py",
        "before.append({s: len(writes[s]) for s in op.reads + op.mutates})",
        "before.append({s: len(writes[s]) for s in op.reads})",
        "Recomputation counts versions wrongly for a storage that an op overwrites without reading it.",
        ("tests/unit/test_overwriting.py", "tests/unit/test_lowering_recompute.py", "tests/unit/test_superneurons.py"),
    ),
    Mutant(
        "kernel-fused-across-a-write",
        "analysis/fusing.py",
        "before |= {reader for s in writes for reader in since.get(s, ())}",
        "before |= {reader for s in op.creates for reader in since.get(s, ())}",
        "An op joins a group although another op overwrites what that group has read.",
        ("tests/unit/test_fusing.py",),
    ),
    # Simulation, planning, placement
    Mutant(
        "simulator-forgets-slowdown",
        "simulator.py",
        "if any(home.contention or home.compute_slowdown for home in costs.homes):",
        "if any(home.contention for home in costs.homes):",
        "The simulator ignores how much copies slow ops down unless they also slow each other down.",
        ("tests/unit/test_contention.py",),
    ),
    Mutant(
        "row-upper-bound-ignored",
        "planning/linear_program.py",
        "self._row_upper.append(high)",
        "self._row_upper.append(INFINITY)",
        "A linear program ignores the upper bound of a row.",
        ("tests/unit/test_linear_program.py",),
    ),
    Mutant(
        "plan-a-page-over-budget",
        "planning/placing.py",
        "            if program.arena_bytes <= budget:\n",
        "            if program.arena_bytes <= budget + PAGE_BYTES:\n",
        "A policy's plan may exceed the budget by one page.",
        ("tests/unit/test_policies.py", "tests/unit/test_planning_properties.py"),
    ),
    Mutant(
        "large-blocks-off-page",
        "planning/placing.py",
        "base = round_up(below.height, PAGE_BYTES)",
        "base = below.height",
        "Large blocks do not start on a page, so direct I/O cannot use them in place.",
        ("tests/unit/test_lowering.py",),
    ),
    Mutant(
        "returning-blocks-share-bytes",
        "planning/placement/placement.cpp",
        "(l.over[a] <= l.slots && l.again[a] < l.over[b] && l.again[b] < l.over[a])",
        "(l.over[a] < 0)",
        "Two blocks that come back before the step ends may get the same bytes.",
        ("tests/unit/test_packing.py",),
    ),
    Mutant(
        "chain-forgets-workspace",
        "planning/remat/chains.h",
        "most = std::max(most, used + s_.workspace[op]);",
        "most = std::max(most, used);",
        "The native search for recomputation ignores the workspaces of the ops that run again.",
        ("tests/unit/test_remat_chains.py",),
    ),
    # The validator and the proof
    Mutant(
        "validator-ignores-readers",
        "validator/programs.py",
        "for earlier in (former.writer, *former.readers.values()):",
        "for earlier in (former.writer,):",
        "The validator accepts a write that may overtake a copy that still reads those bytes.",
        ("tests/unit/test_validator.py", "tests/unit/test_validator_properties.py"),
    ),
    Mutant(
        "validator-trusts-program-order",
        "validator/homes.py",
        "taken = {slot: count for slot, count in taken.items() if not order.before(ends[slot], index)}",
        "taken = {slot: count for slot, count in taken.items() if ends[slot] > index}",
        "The validator frees a home slot in program order, although no wait enforces that order.",
        ("tests/unit/test_several_homes.py", "tests/unit/test_slots.py", "tests/unit/test_validator.py"),
    ),
    Mutant(
        "proof-without-costs",
        "proving.py",
        "validate(graph, planned.program, budget, costs)",
        "validate(graph, planned.program, budget)",
        "A plan runs although an op lacks its workspace or a home gets more than it holds.",
        ("tests/unit/test_proving.py",),
    ),
    # Capture
    Mutant(
        "argument-strides-not-signed",
        "capture/signature.py",
        "leaf.stride(),",
        "leaf.stride()[:0],",
        "A step captured for a contiguous argument also runs for a transposed one.",
        ("tests/torch_cpu/test_capture_signature.py",),
    ),
    Mutant(
        "few-numpy-draws-unnoticed",
        "capture/guard.py",
        "return one[0] == other[0] and bool((one[1] == other[1]).all()) and one[2:] == other[2:]",
        "return bool(one[0] == other[0] and (one[1] == other[1]).all())",
        "A captured step may freeze the first few hundred random numbers that it draws from NumPy.",
        ("tests/torch_cpu/test_capture_guard.py",),
    ),
    Mutant(
        "known-value-after-overwrite",
        "capture/known.py",
        "if not (pending.writes & wanted or pending.reads & changed):",
        "if not pending.writes & wanted:",
        "A value that is known without data is computed from what a later op has written.",
        ("tests/torch_cpu/test_known_values.py",),
    ),
    Mutant(
        "family-without-dtype",
        "capture/operators.py",
        'return f"{dtype}[{shape}]{{{stride}}}',
        'return f"[{shape}]{{{stride}}}',
        "Ops on half and on single precision share one measured profile.",
        (
            "tests/torch_cpu/test_capture_graph.py::test_ops_that_are_alike_are_of_one_family",
            "tests/torch_cpu/test_kept.py",
            "tests/torch_cpu/test_capture_operators.py",
        ),
    ),
    Mutant(
        "step-counted-for-each-range",
        "capture/optimizers.py",
        "given_states = [tensor if tensor.ndim or member.is_last else tensor.clone() for tensor in tensors]",
        "given_states = list(tensors)",
        "The step counter of a parameter that is updated in ranges rises once for each range.",
        ("tests/torch_cpu/test_ranges.py",),
    ),
    Mutant(
        "split-without-trailing-halo",
        "transforms/split/ways.py",
        "return low * self.scale - self.before, high * self.scale + self.after",
        "return low * self.scale - self.before, self.scale * high",
        "A part of a convolution lacks the rows behind it that its last rows read.",
        ("tests/torch_cpu/test_split.py::test_rules_tell_the_truth", "tests/torch_cpu/test_split.py"),
    ),
    # Execution
    Mutant(
        "undo-misses-last-buffer",
        "execution/undo.py",
        "max(b.offset + b.bytes for b in small)",
        "max(b.offset for b in small)",
        "Undoing a failed step does not restore the last of the buffers that change early.",
        ("tests/torch_cpu/test_faults.py", "tests/torch_cpu/test_intruders.py", "tests/torch_cpu/test_copying.py"),
    ),
    Mutant(
        "undo-keeps-generator",
        "execution/undo.py",
        "            generator.set_state(state)\n",
        "            generator.get_state()\n",
        "Undoing a failed step leaves the random generator advanced.",
        ("tests/torch_cpu/test_faults.py::test_a_failing_copy_undoes_the_step_or_tears_it",),
    ),
    Mutant(
        "deferred-interrupt-lost",
        "execution/interrupts.py",
        "if self._pending and not self._is_told:",
        "if len(self._pending) > 1 and not self._is_told:",
        "A single Ctrl-C during a step is dropped instead of being raised after it.",
        ("tests/torch_cpu/test_intruders.py::test_signals_wait_for_the_end_of_what_must_not_be_torn",),
    ),
    Mutant(
        "checksum-not-compared",
        "runtime/csrc/copying.cpp",
        "if (how.code == 0 && sum != nullptr && !one.writes && sum->bytes == piece.bytes &&",
        "if (how.code == 0 && sum != nullptr && !one.writes && sum->bytes > piece.bytes &&",
        "Damaged bytes that come back from a home are used.",
        ("tests/torch_cpu/test_faults.py::test_a_damaged_slot_is_noticed",),
    ),
    Mutant(
        "slot-piece-off-by-a-page",
        "runtime/slots.py",
        "spare[home].append(Piece(piece.offset + used, piece.bytes - used))",
        "spare[home].append(Piece(piece.offset + used - PAGE_BYTES, piece.bytes - used))",
        "Two slots of a home share a page when one takes over a part of another's room.",
        (
            "tests/unit/test_slots.py::test_slots_in_a_freed_slot_share_no_page",
            "tests/torch_cpu/test_tiers.py",
        ),
    ),
    Mutant(
        "user-write-leaves-copy-clean",
        "execution/state_moves.py",
        "if mark == state.mark:",
        "if state.mark is not None:",
        "The copy at home of a frozen weight stays outdated after the user has written to the weight.",
        ("tests/torch_cpu/test_frozen.py",),
    ),
    Mutant(
        "transposed-weight-unnoticed",
        "execution/aliases.py",
        "and list(map(_STRIDE, tensors)) == [value.stride for value in values]",
        "and len(tensors) == len(values)",
        "A weight that the user has transposed in place is used as it lay before.",
        ("tests/torch_cpu/test_surgery.py::test_a_weight_that_is_transposed_in_place_is_noticed",),
    ),
    Mutant(
        "memory-copy-without-last-page",
        "runtime/csrc/file_io.h",
        "std::memcpy(t.writes ? outside : inside, t.writes ? inside : outside, static_cast<size_t>(t.bytes));",
        "std::memcpy(t.writes ? outside : inside, t.writes ? inside : outside,\n"
        "                static_cast<size_t>(t.bytes / kPage * kPage));",
        "A copy to or from host memory leaves out what does not fill its last page.",
        ("tests/torch_cpu/test_copying.py",),
    ),
    Mutant(
        "fingerprint-without-last-bytes",
        "runtime/csrc/checksum.h",
        "std::memcpy(last, bytes + at, static_cast<size_t>(count - at));",
        "std::memcpy(last, bytes + at, static_cast<size_t>((count - at) / 8 * 8));",
        "A fingerprint does not depend on the last bytes when their number is not a multiple of eight.",
        ("tests/torch_cpu/test_frozen.py::test_a_fingerprint_sees_bits_places_and_lengths",),
    ),
    Mutant(
        "arena-hands-out-bytes-in-use",
        "runtime/csrc/arena.cpp",
        "if (request->bytes == bytes && !taken(t, *request)) {",
        "if (request->bytes == bytes) {",
        "The arena serves a planned request at bytes that an earlier one still uses.",
        ("tests/torch_cpu/test_arena.py",),
    ),
    # Followed loops
    Mutant(
        "damage-is-accepted",
        "runtime/csrc/follow/blocks.h",
        "return sums.compared == block.sums.compared;",
        "return block.touched || true;",
        "An eager loop takes whatever comes from its disk.",
        ("tests/torch_cpu/test_follow_damage.py",),
    ),
    Mutant(
        "unseen-write-is-damage",
        "runtime/csrc/follow/blocks.h",
        "if (is_compared(space, block)) block.touched |=",
        "if (false) block.touched |=",
        "An eager loop does not ask whether others wrote to what is away.",
        ("tests/torch_cpu/test_follow_damage.py",),
    ),
    Mutant(
        "operands-may-be-evicted",
        "runtime/csrc/follow/blocks.h",
        "!block.dying && block.pins == 0 && block.works == 0 && blind == 0 &&",
        "!block.dying && block.works == 0 && blind == 0 &&",
        "An operand of the running op may be evicted to make room for another one.",
        ("tests/torch_cpu/test_follow.py", "tests/torch_cpu/test_follow_fuzz.py"),
    ),
    Mutant(
        "operands-of-other-threads-may-be-evicted",
        "runtime/csrc/follow/blocks.h",
        "!block.dying && block.pins == 0 && block.works == 0 && blind == 0 &&",
        "!block.dying && block.pins == block.others && block.works == 0 && blind == 0 &&",
        "An operand of another thread's running op may be evicted.",
        ("tests/torch_cpu/test_follow_threads.py",),
    ),
    Mutant(
        "collective-forgotten-once-away",
        "runtime/csrc/follow/blocks.h",
        "return block.others > 0 || block.works > 0 || blind > 0 ||",
        "return block.others > 0 || blind > 0 ||",
        "What a collective writes to an evicted tensor is lost when that tensor is fetched.",
        ("tests/torch_cpu/test_follow_together.py",),
    ),
    Mutant(
        "small-tensors-are-free",
        "runtime/csrc/follow/space.h",
        "int64_t room() const { return budget + grown - spare - small(); }",
        "int64_t room() const { return budget + grown - spare; }",
        "Small tensors of a loop take memory beside the budget.",
        ("tests/torch_cpu/test_follow_memory.py",),
    ),
    Mutant(
        "room-stays-grown",
        "runtime/csrc/follow/room.h",
        "if (std::exchange(space.grown, 0) == 0) return;",
        "if (space.grown == 0) return;",
        "A loop that may grow stays above its budget after the op that needed more.",
        ("tests/torch_cpu/test_follow_measure.py",),
    ),
    Mutant(
        "need-without-operands",
        "runtime/csrc/follow/ops.h",
        "if (space.excess == Excess::kMeasured) note_need(space, 0);",
        "if (space.excess == Excess::kRefused) note_need(space, 0);",
        "The measured smallest budget leaves out ops that ask for no memory.",
        ("tests/torch_cpu/test_follow_measure.py",),
    ),
    Mutant(
        "address-given-while-others-look",
        "runtime/csrc/follow/paging.cpp",
        "(copied() || (looked_at() && lately()));",
        "copied();",
        "A tensor whose address a thread takes stays in the arena for good, if another thread runs its first op then.",
        ("tests/torch_cpu/test_follow_threads.py",),
    ),
    Mutant(
        "readers-between-loops-are-not-seen",
        "runtime/csrc/follow/paging.cpp",
        "if (living_spaces.load(std::memory_order_relaxed) == 0 || is_opener()) return 0;",
        "if (is_left() || is_opener()) return 0;",
        "A loop that opens takes over what another thread is saving.",
        ("tests/torch_cpu/test_follow_threads.py",),
    ),
    Mutant(
        "works-are-not-waited-for",
        "runtime/csrc/follow/room.h",
        "!outlive_dying(space) && !outlive_works(space)",
        "!outlive_dying(space) && true",
        "A request is refused while a collective holds what would leave for it.",
        ("tests/torch_cpu/test_follow_together.py",),
    ),
    Mutant(
        "stale-ranks-are-kept",
        "runtime/csrc/follow/ranking.h",
        "key < item->rank.key",
        "key < 0",
        "A block keeps its place in the order of eviction although it is used sooner.",
        ("tests/unit/test_follow_native.py",),
    ),
    Mutant(
        "slot-of-a-child-overwritten",
        "runtime/csrc/follow/blocks.h",
        "if (block.slot && !block.slot.original && !space.homes.frozen(block.slot)) return;",
        "if (block.slot && !block.slot.original) return;",
        "A process overwrites a home slot that its forked child still reads.",
        ("tests/torch_cpu/test_follow.py::test_a_child_sees_the_bytes_of_its_moment_and_changes_none",),
    ),
    Mutant(
        "schedule-releases-one-op-early",
        "follow/records.py",
        "leave.append((record.places[decision.release_by % count] % ops, gap.storage))",
        "leave.append(((record.places[decision.release_by % count] - 1) % ops, gap.storage))",
        "A followed loop may evict a storage one op before its plan says so.",
        ("tests/unit/test_follow_records.py::test_schedule_follows_the_plan_exactly",),
    ),
    Mutant(
        "page-map-of-first-page-alone",
        "runtime/csrc/follow/homes.h",
        "return file_->pages().any_written(window(), bytes_);",
        "return file_->pages().any_written(window(), 0);",
        "What unseen code writes to a weight that is mapped from a file is lost beyond its first page.",
        ("tests/torch_cpu/test_follow_files.py::test_unseen_write_to_the_end_of_a_mapped_weight_counts",),
    ),
    Mutant(
        "present-use-counts-as-next",
        "runtime/csrc/follow/history.h",
        "std::upper_bound(found->second.begin(), found->second.end(), position_)",
        "std::lower_bound(found->second.begin(), found->second.end(), position_)",
        "The history of a loop takes the present use of a storage for its next one.",
        ("tests/unit/test_follow_native.py",),
    ),
    Mutant(
        "scratch-in-a-result-in-use",
        "runtime/csrc/follow/requests.h",
        "mine.until > static_cast<int32_t>(later)",
        "mine.until > static_cast<int32_t>(later) + 1",
        "Scratch memory of an op lies in one of its results that is already in use.",
        ("tests/unit/test_follow_native.py",),
    ),
    Mutant(
        "recomputation-moves-generator",
        "runtime/csrc/follow/lineage.h",
        "  put(now);\n  return stack;",
        "  now = at::Generator();\n  return stack;",
        "Recomputing dropout leaves the random generator where the forward pass had it.",
        ("tests/torch_cpu/test_follow_recompute.py::test_dropout_is_made_again_with_the_same_draws",),
    ),
    Mutant(
        "recipe-misses-changed-input",
        "runtime/csrc/follow/recipes.h",
        "for (const auto& recipe : readers) keep(recipe);",
        "readers.clear();",
        "A saved tensor cannot be recomputed once an op has changed one of its inputs.",
        (
            "tests/torch_cpu/test_follow_recompute.py::test_what_is_changed_before_backward_counts_as_in_eager",
            "tests/torch_cpu/test_follow_recompute.py",
        ),
    ),
    Mutant(
        "plan-store-ignores-budget",
        "follow/loop_plans.py",
        "key_of(_FORMAT, budget, policy, ops, storages)",
        "key_of(_FORMAT, policy, ops, storages)",
        "A loop follows a stored plan that was made for another budget.",
        ("tests/torch_cpu/test_follow_plans.py::test_the_next_process_has_the_plan_at_once",),
    ),
    # Several processes
    Mutant(
        "gradients-summed-in-reverse",
        "logical_workers/ordered_sum.py",
        "for number, gradients in enumerate(own):",
        "for number, gradients in enumerate(reversed(own)):",
        "The gradients of the workers of one process are added up in reverse order.",
        ("tests/torch_cpu/test_ordered_sum.py",),
    ),
    Mutant(
        "share-without-next-turn",
        "logical_workers/assignment.py",
        "key=lambda p: ((counts[p] + 1) * seconds[p], p)",
        "key=lambda p: (counts[p] * seconds[p], p)",
        "A slow process gets a worker although another process would finish it sooner.",
        ("tests/unit/test_assignment.py",),
    ),
    Mutant(
        "gradient-orders-not-compared",
        "distributed/agreement.py",
        "if other.orders != first.orders:",
        "if len(other.orders) != len(first.orders):",
        "Processes train together although DistributedDataParallel orders their gradients differently.",
        ("tests/torch_cpu/test_distributed.py::test_different_orders_of_gradients_are_refused",),
    ),
    # Files
    Mutant(
        "index-overwritten-in-place",
        "checkpoint/saving.py",
        "    new = folder / _NEW_INDEX\n",
        "    new = folder / INDEX\n",
        "A crash while the index of a checkpoint is written loses the checkpoint that was there before.",
        ("tests/torch_cpu/test_checkpoint.py::test_a_crash_at_any_call_leaves_a_checkpoint",),
    ),
    Mutant(
        "data-file-not-synced",
        "checkpoint/tensor_files.py",
        "            os.fsync(self._descriptor)\n",
        "            os.fstat(self._descriptor)\n",
        "A power failure after a save loses tensors that the new index already names.",
        ("tests/torch_cpu/test_checkpoint.py::test_save_syncs_each_file_before_the_index_names_it",),
    ),
    Mutant(
        "shard-filled-from-the-start",
        "checkpoint/loading.py",
        "crc32 = fill_range(target, shard.start, entry, source, faces, buffer, crc32)",
        "crc32 = fill_range(target, 0, entry, source, faces, buffer, crc32)",
        "Each process loads the first range of a parameter that is spread over processes.",
        ("tests/torch_cpu/test_sharded.py::test_what_is_seen_between_steps_what_is_refused_and_a_process_that_ends",),
    ),
    Mutant(
        "trailing-bytes-accepted",
        "checkpoint/tensor_files.py",
        "    if end != total:\n",
        "    if end > total:\n",
        "A safetensors file with bytes that belong to no tensor is taken for a whole one.",
        (
            "tests/torch_cpu/test_weights_in_place.py::test_damaged_headers_are_refused_with_one_error",
            "tests/torch_cpu/test_materialization.py",
            "tests/torch_cpu/test_checkpoint.py",
        ),
    ),
    Mutant(
        "modules-initialised-outer-first",
        "materialization.py",
        "    for child in module.children():\n        yield from _inner_first(child, seen)\n    yield module\n",
        "    yield module\n    for child in module.children():\n        yield from _inner_first(child, seen)\n",
        "A materialized model draws its initial numbers in another order than its constructor.",
        ("tests/torch_cpu/test_materialization.py::test_a_model_on_meta_is_initialised_by_its_modules",),
    ),
    Mutant(
        "average-pool-counts-padding",
        "onnx/operators/networks.py",
        "ceil_mode: int = 0, count_include_pad: int = 0",
        "ceil_mode: int = 0, count_include_pad: int = 1",
        "ONNX average pooling counts the padding when a model leaves that attribute out.",
        ("tests/torch_cpu/test_onnx.py",),
    ),
    # What users write and see
    Mutant(
        "gigabytes-read-as-gibibytes",
        "units.py",
        '"GB": 10**9,',
        '"GB": GIB,',
        "A budget of 6 GB is taken for 6 GiB.",
        ("tests/unit/test_units.py",),
    ),
    Mutant(
        "script-end-not-escaped",
        "report/page.py",
        '.replace("<", "\\\\u003c")',
        '.replace("\\\\u2028", "")',
        "A module named after a closing script tag ends the data of a report's page early.",
        ("tests/unit/test_page.py", "tests/unit/test_page_in_browser.py"),
    ),
)

"""Keys of `zero_optimization`, but for offload."""

from __future__ import annotations

from rayzero.engine.config.keys.spec import IMPLEMENTED, NO_OP, REFUSED, Key

_FIXED_MEMORY_REASON = (
    "units take turns in a fixed number of slots: rayzero.slots bounds what is live"
)

SHARDING_KEYS = (
    Key("zero_optimization.stage", IMPLEMENTED, "what is sharded over the ranks"),
    Key("zero_optimization.overlap_comm", IMPLEMENTED, "gradients travel while backward goes on"),
    Key(
        "zero_optimization.reduce_bucket_size",
        IMPLEMENTED,
        "elements reduced together at stages 0 to 2; by default an eighth of the model, at least "
        "250 thousand and at most 4 million",
    ),
    Key(
        "zero_optimization.allgather_bucket_size",
        IMPLEMENTED,
        "elements of weights gathered together at stages 1 and 2; a bucket is both summed and "
        "gathered, so the smaller of the two sizes holds",
    ),
    Key(
        "zero_optimization.contiguous_gradients",
        NO_OP,
        "gradients are copied behind one another",
        "always so here: gradients lie in flat buffers",
    ),
    Key(
        "zero_optimization.reduce_scatter",
        NO_OP,
        "a rank receives only its part of a sum",
        "always so here at stages 1 to 3",
    ),
    Key(
        "zero_optimization.use_multi_rank_bucket_allreduce",
        NO_OP,
        "parts for several ranks travel in one collective",
        "always so here: a bucket is one collective",
    ),
    Key(
        "zero_optimization.allgather_partitions",
        NO_OP,
        "updated weights are gathered in one collective instead of many broadcasts",
        "the collective is chosen by backend; the result is the same",
    ),
    Key(
        "zero_optimization.round_robin_gradients",
        NO_OP,
        "gradients of a bucket belong to the ranks in turn",
        "every rank owns an equal part of every bucket, so all of them work all the time",
    ),
    Key(
        "zero_optimization.parameter_alignment",
        NO_OP,
        "parameters start at aligned addresses in flat buffers",
        "always so here: at multiples of 32 elements",
    ),
    Key(
        "zero_optimization.ignore_unused_parameters",
        NO_OP,
        "parameters without a gradient are no error",
        "always so here: their gradient is zero",
    ),
    Key(
        "zero_optimization.compute_grad_norm",
        NO_OP,
        "the gradient norm is worked out at every step",
        "always so here: the guard against inf and nan needs it",
    ),
    Key(
        "zero_optimization.sub_group_size",
        IMPLEMENTED,
        "the most elements that the optimizer updates in one piece, with offload to nvme",
    ),
)

STAGE_3_KEYS = (
    Key(
        "zero_optimization.stage3_prefetch_bucket_size",
        NO_OP,
        "elements gathered ahead of their use",
        "the next unit is gathered while one computes, whatever its size",
    ),
    Key(
        "zero_optimization.stage3_param_persistence_threshold",
        NO_OP,
        "smaller parameters are not sharded",
        "all parameters of a unit travel in one collective, so small ones cost nothing",
    ),
    Key(
        "zero_optimization.stage3_model_persistence_threshold",
        NO_OP,
        "elements that may stay unsharded that way",
        "there are none",
    ),
    Key(
        "zero_optimization.stage3_max_live_parameters",
        NO_OP,
        "elements that may be gathered at once",
        _FIXED_MEMORY_REASON,
    ),
    Key(
        "zero_optimization.stage3_max_reuse_distance",
        NO_OP,
        "what is used again so soon is kept",
        _FIXED_MEMORY_REASON,
    ),
    Key(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        NO_OP,
        "save_16bit_model gathers sharded weights",
        "it always does here",
    ),
    Key(
        "zero_optimization.stage3_module_granularity_threshold",
        NO_OP,
        "small modules are gathered with their parents",
        "units are whole blocks: rayzero.unit_classes chooses them",
    ),
    Key(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        NO_OP,
        "weights are gathered by an all-reduce",
        "the collective is chosen by backend; the result is the same",
    ),
    Key(
        "zero_optimization.stage3_allgather_sequential",
        NO_OP,
        "weights are gathered one by one, without a bucket to copy from",
        "nothing is copied here: a unit is gathered in place",
    ),
    Key(
        "zero_optimization.memory_efficient_linear",
        NO_OP,
        "a linear layer that does not keep its weight for backward",
        "a unit comes back for backward at the address it had: nothing is kept",
    ),
    Key(
        "zero_optimization.override_module_apply",
        NO_OP,
        "module.apply gathers sharded weights",
        "apply works while the model is built, before it is sharded",
    ),
    Key(
        "zero_optimization.log_trace_cache_warnings",
        NO_OP,
        "a change of the order of modules is logged",
        "the order is learned anew",
    ),
    Key(
        "zero_optimization.leaf_module.classes",
        REFUSED,
        "classes of modules that are gathered as a whole",
        alternative="rayzero.unit_classes",
    ),
    Key(
        "zero_optimization.leaf_module.names",
        REFUSED,
        "names of modules that are gathered as a whole",
        alternative="rayzero.unit_classes",
    ),
    Key(
        "zero_optimization.leaf_module.name_suffixes",
        REFUSED,
        "ends of such names",
        alternative="rayzero.unit_classes",
    ),
    Key(
        "zero_optimization.zero_hpz_partition_size",
        IMPLEMENTED,
        "consecutive ranks among which gathered weights are kept a second time, so that further "
        "gathers of a step stay among them; stage 3. It divides the world size; in an elastic job "
        "the next smaller size that does is used, and said",
    ),
    Key(
        "zero_optimization.zero_quantized_weights",
        IMPLEMENTED,
        "gathered weights travel in int8 blocks; stage 3",
    ),
    Key(
        "zero_optimization.zero_quantized_nontrainable_weights",
        REFUSED,
        "frozen weights rest and travel in int8 blocks",
        alternative="zero_quantized_weights",
    ),
    Key(
        "zero_optimization.zero_quantized_gradients",
        IMPLEMENTED,
        "gradients travel in int8 blocks, at any stage",
    ),
)

OTHER_ZERO_KEYS = (
    Key(
        "zero_optimization.load_from_fp32_weights",
        NO_OP,
        "main weights are loaded from fp32 copies, not from 16-bit weights",
        "checkpoints hold the main weights",
    ),
    Key(
        "zero_optimization.elastic_checkpoint",
        NO_OP,
        "a checkpoint can be loaded by another number of ranks",
        "every checkpoint can",
    ),
    Key(
        "zero_optimization.pipeline_loading_checkpoint",
        NO_OP,
        "ranks load a checkpoint one after the other",
        "a rank reads only the ranges that it needs",
    ),
    Key(
        "zero_optimization.legacy_stage1",
        NO_OP,
        "an older implementation of stage 1",
        "there is one implementation; the result is the same",
    ),
    Key(
        "zero_optimization.enable_sanity_checks",
        NO_OP,
        "internal checks",
        "what is checked here is always checked",
    ),
    Key(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        NO_OP,
        "Muon's momentum is not offloaded to NVMe",
        "it rests where the rest of the optimizer state does",
    ),
)

"""Every setting: one dataclass per TOML section, and under each field its manual.

The text under a field is what `--help` and docs/configuration.md show: what it does, its unit, what
it costs, and when it has no effect. Section and key names are TorchTitan's where TorchTitan has
them. Rules that join several keys are in validate.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan_lc.config.token_count import TokenCount


@dataclass
class Job:
    """Where the run's files go and what it calls itself."""

    config_file: str | None = None
    """The TOML file to read: a path, or the bare name of a file in train_configs/. `--config` and
    the environment variable CONFIG_FILE mean the same. Command line only."""
    dump_folder: str = "./outputs"
    """Folder for all that a run writes: checkpoints, metrics, traces, the resolved config."""
    description: str = "torchtitan_lc job"
    """A line about the run, logged at start. Changes nothing."""
    print_config: bool = False
    """Print the resolved configuration as TOML and end, without starting a job (run_train.sh)."""


@dataclass
class Profiling:
    """Traces of the torch profiler and snapshots of GPU memory."""

    enable_profiling: bool = False
    """Record a trace of some steps, readable in Perfetto. Costs a few percent in the recorded steps
    and a file per rank."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, under dump_folder."""
    profile_freq: int = 10
    """Steps from one trace to the next; at least profiler_warmup + profiler_active."""
    profiler_active: int = 1
    """Steps recorded in each trace. A step of millions of tokens makes a large file: keep it 1."""
    profiler_warmup: int = 3
    """Steps during which the profiler runs but its records are thrown away: the first ones are
    distorted by its own start."""
    enable_memory_snapshot: bool = False
    """Record the history of GPU allocations and write a snapshot (for pytorch.org/memory_viz) each
    profile_freq steps, and when memory runs out. Slows the host noticeably. No effect on CPU."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, under dump_folder."""


@dataclass
class Metrics:
    """What is said about the steps, and where."""

    log_freq: int = 10
    """Steps between log lines; step 1 is always logged. A logged step costs one device
    synchronisation and a small all-reduce."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard files, under dump_folder."""
    enable_wandb: bool = False
    """Send metrics to Weights & Biases; needs the extra `wandb`. WANDB_* variables name the run."""
    save_for_all_ranks: bool = False
    """Every rank writes its own TensorBoard or W&B metrics, not only rank 0."""
    disable_color_printing: bool = False
    """Plain log lines even on a terminal. Log files never hold colours."""


@dataclass
class ModelRope:
    """Overrides of the flavor's rotary embedding, for extending its context (docs/models.md). A key
    left out keeps the flavor's own value. The whole setting is written into an exported config.json."""

    theta: float | None = None
    """Base of the rotation frequencies (rope_theta): larger turns slower and reaches further."""
    type: Literal["default", "linear", "ntk", "dynamic", "yarn", "llama3"] | None = None
    """How frequencies are scaled: `default` not at all; `linear` all alike by `factor`; `ntk` as a
    theta that slows the slowest pair by `factor`; `dynamic` transformers' variant of it, for
    training.seq_len; `yarn` those that turn less than once in the original context, with steeper
    scores; `llama3` much the same with scores as they are. A type other than the flavor's replaces
    the flavor's scaling."""
    factor: float | None = None
    """How many times further than original_max_position_embeddings the model is to reach, at least
    1. Needed by linear, ntk, dynamic and yarn; llama3 has 8."""
    original_max_position_embeddings: int | None = None
    """The context, in tokens, for which the model was first trained. Left out: the flavor's own."""
    low_freq_factor: float | None = None
    """llama3 only: wavelengths above original_max_position_embeddings / this are slowed by the whole
    factor."""
    high_freq_factor: float | None = None
    """llama3 only: wavelengths below original_max_position_embeddings / this are left alone; in
    between, the two are blended. Must exceed low_freq_factor."""
    beta_fast: float | None = None
    """yarn only: pairs that turn more often than this in the original context are left alone (32)."""
    beta_slow: float | None = None
    """yarn only: pairs that turn less often than this are slowed by the whole factor (1); in between,
    the two are blended."""
    truncate: bool | None = None
    """yarn only: whether the blended range is rounded outwards to whole pairs (true)."""
    attention_factor: float | None = None
    """yarn only: multiplies cos and sin, so scores by its square. Left out: 0.1 ln(factor) + 1, or
    what mscale and mscale_all_dim give."""
    mscale: float | None = None
    """yarn only, with mscale_all_dim: the attention factor is then
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
    mscale_all_dim: float | None = None
    """yarn only: see mscale."""


@dataclass
class Model:
    """Which network, of which size, and its tokenizer."""

    name: str = "llama3"
    """A registered model. `experimental.custom_import` can register more."""
    flavor: str = "debugmodel"
    """A size that the model offers, e.g. debugmodel, 8B, 70B (docs/models.md); `from_hf` reads it
    from config.json in hf_assets_path."""
    hf_assets_path: str = ""
    """Folder of a Hugging Face model: its tokenizer files (tokenizer.json, or a tiktoken *.model),
    its config.json for flavor `from_hf`, its weights for checkpoint.initial_load_in_hf."""
    tokenizer: Literal["auto", "byte", "hf", "tiktoken"] = "auto"
    """`auto` looks in hf_assets_path: tokenizer.json gives `hf`, *.model gives `tiktoken`; without
    hf_assets_path it is `byte`, which needs no files and makes a token of each byte."""
    rope: ModelRope = field(default_factory=ModelRope)
    """Overrides of the flavor's rotary embedding: section [model.rope]."""


@dataclass
class Optimizer:
    """How gradients become updates. Weight decay touches matrices only."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """AdamW and Adam keep two values per parameter, in its dtype; SGD keeps none."""
    lr: float = 8e-4
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Adam's decay of the mean of gradients, in [0, 1). No effect under SGD."""
    beta2: float = 0.95
    """Adam's decay of the mean of squared gradients, in [0, 1). No effect under SGD."""
    eps: float = 1e-8
    """Added to Adam's denominator. No effect under SGD."""
    weight_decay: float = 0.1
    """Share of a matrix taken off per unit of learning rate; norms and biases are spared."""
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    """`fused` is one kernel, fastest; `foreach` batches small ones and briefly holds temporaries as
    large as the parameters; `for-loop` is slow and leanest. `auto`: fused, but foreach for SGD."""
    offload_state: bool = False
    """Keep the moments of AdamW and Adam in pinned host memory; a step brings those of one parameter
    after another to the GPU and back. Same numbers. Takes 2 values per parameter of a rank from GPU
    to host memory. Costs their way over the bus, both directions at once (AdamW in fp32: 8 bytes per
    parameter of a rank; planned 0.15 s per 1e9 parameters on an H200), and while a step runs up to 4 times
    the largest parameter's shard on the GPU. No effect with training.enable_cpu_offload, and under SGD."""


@dataclass
class LRScheduler:
    """Warm-up, an optional stable stretch, then decay."""

    warmup_steps: int = 200
    """Steps of linear rise to the peak; the first one takes 1 / warmup_steps of it. Cut to the
    schedule's length if it is longer."""
    total_steps: int | None = None
    """Length of the schedule. Left out: training.steps. Give it when a run will be continued to a
    later step, so that the decay keeps its place."""
    decay_ratio: float | None = None
    """Share of the schedule spent decaying, in [0, 1], after a stable stretch at the peak. 0: no
    decay. Left out: decay starts right after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay from the peak to min_lr_factor."""
    min_lr_factor: float = 0.0
    """Where the decay ends, as a share of the peak, in [0, 1]."""


@dataclass
class Training:
    """The data, the size of a step, and the precision."""

    dataset: Literal["stdlib", "text", "jsonl", "hf"] = "stdlib"
    """`stdlib`: source text of the running Python's own library, no download; `text`: plain files;
    `jsonl`: one object a line, its `text` field; `hf`: a streamed Hugging Face data set (extra
    `hf`)."""
    dataset_path: str = ""
    """File or folder of `text` and `jsonl`; name or folder of `hf`. No effect under `stdlib`."""
    local_batch_size: int = 1
    """Rows per data-parallel group and micro-batch. The ranks of context_parallel_degree share each
    row. Activation memory grows in proportion."""
    global_batch_size: int = -1
    """Rows per optimizer step over all ranks. Gradients accumulate over global / (local x
    data-parallel degree) micro-batches, which must be whole. -1: one micro-batch."""
    seq_len: TokenCount = 2048
    """Tokens in a row, over all its ranks. Activation memory grows in proportion, attention time with
    the square. Rows that the ranks cannot cut evenly are padded; padding is neither seen by other
    tokens nor trained on."""
    isolate_documents: bool = True
    """Tokens of one document in a row do not see those of another, and positions restart with each.
    false: a row is one document, whatever it was packed from."""
    max_norm: float = 1.0
    """Gradients are scaled down when their global norm exceeds this. `inf`: never."""
    steps: int = 10000
    """The step at which training ends, counted from the start of the first run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and optimizer state between steps. bfloat16 halves both and keeps no
    fp32 master copy: updates smaller than 1/256 of a weight are lost."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which FSDP gathers parameters, and so of all computing."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over ranks. bfloat16 halves the traffic and rounds."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory (FSDP2's offload policy);
    the GPU holds what is gathered, and the CPU does the optimizer's step. For models whose shards
    don't fit; costs a copy of the shards per gather, one of the gradients per micro-batch, and a
    step at the speed of host memory. Host memory: 16 bytes per parameter of a rank with AdamW in
    fp32, and as pinned tensors are rounded up to a power of two, up to 24. On a CPU it frees nothing.
    For optimizer state alone, whose step stays on the GPU, see optimizer.offload_state."""
    release_cached_memory: bool | Literal["auto"] = "auto"
    """Memory that torch's allocator holds without using it goes back to the device before a step and,
    in backward, after the head and between the halves of every block, so that what is reserved stays
    near what is allocated. The GPU runs dry for a moment each time. `auto`: where a hidden-state buffer
    takes more than a 64th of the device's memory, as steps are long there. No effect on CPU."""
    gc_freq: int = 50
    """Steps between runs of Python's garbage collector, which is otherwise off so that ranks do not
    stall one another at random moments."""


@dataclass
class Parallelism:
    """How the ranks are arranged: replicate x shard x context_parallel = number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP). Memory grows in proportion; gathers stay in a copy."""
    data_parallel_shard_degree: int = -1
    """Groups with rows of their own. Parameters are sharded over this x context_parallel_degree, so
    raising the latter costs no parameter memory. -1: all ranks that the other degrees leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """`always` frees a block's gathered weights after its forward and gathers again for backward;
    `never` keeps them (bf16: 2 bytes per parameter per rank); `default` is `always` but for the
    last block and the head, which backward needs at once."""
    context_parallel_degree: int = 1
    """Ranks that share each row. A rank holds seq_len / this tokens."""
    context_parallel_ulysses_degree: int = -1
    """Of those ranks, how many exchange heads (Ulysses); a divisor of context_parallel_degree. The
    rest pass K and V round a ring, in zigzag. -1: as many as divide it, stay inside a node and
    leave at most one head slot in sixteen idle; 1 under the strategy `ring`."""


@dataclass
class Attention:
    """How attention is spread over the ranks of a row, and which kernel computes it."""

    strategy: Literal["auto", "local", "ulysses", "upipe", "ring"] = "auto"
    """`local`: a row lives on one rank; `ulysses`: one exchange of all heads, the most memory;
    `upipe`: Untied Ulysses, a few heads at a time, the least memory; `ring`: no heads are
    exchanged, K and V go round. With a context_parallel_ulysses_degree below the whole, ulysses
    (then USP) and upipe run around a ring. `auto`: local when context_parallel_degree is 1, else
    upipe. All give the same function of the same weights."""
    kernel: Literal["auto", "cpu", "cudnn", "sdpa", "fa4", "fa3", "fa2", "math"] = "auto"
    """`fa4` (extra `fa4`, fastest on Hopper), `fa3` and `fa2` (if their packages are installed),
    `cudnn` and `sdpa` (in torch) need CUDA; `cpu` is torch's flash kernel there; `math` runs
    anywhere, holds the full score matrix, and is for tests. `auto` takes the fastest that can do
    the case, where rows hold several documents one with a packed form, and logs why."""
    heads_per_stage: int = 1
    """Query heads of a rank that one upipe stage works on. More heads: fewer exchanges, larger
    buffers; the last stage takes what is left. No effect under the other strategies."""
    hold_normed_input: bool | Literal["auto"] = "auto"
    """Keep the normalised input of attention from its first projection to its last, instead of making
    it again by tiles for each (stages + arrivals of KV heads times): one more hidden-state-sized
    buffer in attention's forward and backward, fewer norms. Same numbers. `auto`: where such a buffer
    is at most a 64th of the device's memory."""
    sum_kv_gradients: bool | Literal["auto"] = "auto"
    """Sum the gradients of K and V over the upipe stages that share them before they go back, instead
    of sending those of each stage: two more buffers of a stage's KV heads at the peak, fewer
    exchanges. `auto`: as for hold_normed_input."""
    overlap_exchange: bool | Literal["auto"] = "auto"
    """Exchange the heads of an upipe stage beside projections, in forward those that come back, instead
    of waiting for each. No heads travel beside a kernel, which they would slow down. Costs one
    hidden-state-sized buffer at the peak with one head per stage of 32 on 8 ranks. No effect on a
    single rank. `auto`: as for hold_normed_input."""
    self_check: bool = True
    """Before training, run a cut-down copy of the model on a short row, spread over the ranks and
    whole on one, and stop if loss or gradients differ. A few seconds; no effect when
    context_parallel_degree is 1."""


@dataclass
class ActivationCheckpoint:
    """What a block keeps from forward for backward."""

    mode: Literal["none", "full", "selective"] = "selective"
    """`full` keeps only block inputs and computes all again; `selective` keeps attention's output
    and log-sum-exp too, one more hidden-state-sized buffer per layer, and does not run attention
    twice (at long context about a fifth of the step); `none` keeps everything. Same numbers."""
    selective_layers: int | Literal["auto"] = "auto"
    """Under `selective`, how many layers keep attention's output; the others run as under `full`. Each
    costs one hidden-state-sized buffer and saves one run of its attention. It is the last layers
    that keep: backward comes to them first. `auto`: all, with activation_offload as many as its host
    memory holds."""
    block_inputs_every: int = 1
    """Keep the input of every n-th block only, and make those between again from it: 1/n of the
    memory for block inputs, for one more run of (n - 1)/n of the blocks, without their attention if
    that is kept, and n - 1 more hidden-state-sized buffers and the gathered weights of n blocks, not
    of 2, at the peak. No effect under `none`."""


@dataclass
class ActivationOffload:
    """What blocks keep for backward, in host memory, copied beside the computation. Same numbers."""

    enable: bool = False
    """Block inputs, but the last, and what attention keeps go to page-locked host memory, and come
    back when backward comes to their block. Needs activation_checkpoint.mode `full` or `selective`."""
    host_memory_gib: float | Literal["auto"] = "auto"
    """Host memory that a rank may use for it, in GiB. What does not fit stays on the GPU (block
    inputs, attention outputs of a number of selective_layers) or is computed again (attention outputs
    under selective_layers `auto`). `auto`: 9 tenths of what node and cgroup have free, shared by
    the node's ranks."""
    early_fetch: bool | Literal["auto"] = "auto"
    """Bring tensors back while the kernel before their use runs, not after it: hides all copies for
    about two more hidden-state-sized buffers at the peak. `auto`: where such a buffer is at most a
    64th of the device's memory."""


@dataclass
class Tiling:
    """How many tokens of a rank the token-wise parts work on at once. Smaller tiles hold less
    memory at a time; below a few thousand tokens matrix products slow down."""

    projection_tokens: TokenCount = 16384
    """Tile of the normalised input and the attention projections. 0: all at once."""
    mlp_tokens: TokenCount = 16384
    """Tile of the MLP half of a block, forward and backward. 0: all at once."""
    loss_tokens: TokenCount = 4096
    """Tile of final norm, head and cross-entropy: fp32 logits of this x vocabulary size exist at
    once (2 GiB for 4096 and Llama 3's vocabulary). 0: all at once."""


@dataclass
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the tile functions (projection, MLP, loss). Faster steps after a slower first one."""
    backend: str = "inductor"
    """Backend handed to torch.compile."""


@dataclass
class Float8:
    """The matrix products of the blocks in float8, through torchao (docs/models.md says which, and what it
    does to the numbers). Weights, gradients, optimizer and everything else stay as they are."""

    enable: bool = False
    """Multiply in float8, forward and backward, in the query, key, value and output projections and in
    the MLP. Needs the extra `float8`, a GPU of compute capability 8.9 or above, mixed_precision_param
    bfloat16, and widths and heads that are multiples of 16. Made for compile.enable: uncompiled, each
    cast is several passes over memory."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How values are scaled into float8's range: `tensorwise` by one factor per tile and per weight, the
    fastest; `rowwise` by one per row, which an outlier harms less; `rowwise_with_gw_hp` likewise, but
    the products for weight gradients stay in bf16, the most accurate."""
    filter_fqns: list[str] = field(default_factory=list)
    """Weights whose name contains one of these are multiplied as without float8, e.g.
    `attention.wk,attention.wv` or `layers.0.`; a text that is in no name is refused."""
    emulate: bool = False
    """Round to float8 and multiply in fp32, on any device: for tests and for a look at the effect on
    the loss. Slow."""


@dataclass
class Checkpoint:
    """Saving the run, and continuing it by the same command."""

    enable: bool = False
    """Save, and at start continue from the newest complete step in the folder, if there is one."""
    folder: str = "checkpoint"
    """Folder of the step-N folders, under dump_folder."""
    interval: int = 500
    """Steps between saves. The last step is always saved."""
    initial_load_path: str | None = None
    """A step folder, or with initial_load_in_hf a Hugging Face folder, to start from when the job's
    own folder holds no checkpoint; ignored, and said, when it does."""
    initial_load_in_hf: bool = False
    """Start from a Hugging Face folder of safetensors: initial_load_path, or model.hf_assets_path if that
    is not set. Each rank reads its part of each tensor. Missing, extra or mis-shaped tensors stop
    the job before it starts."""
    initial_load_model_only: bool = True
    """From initial_load_path take the weights only; otherwise step, optimizer and data too."""
    last_save_model_only: bool = False
    """The last save holds weights only, and so cannot be continued from."""
    last_save_in_hf: bool = False
    """Beside the last step folder write a Hugging Face folder, <dump_folder>/hf/step-N: safetensors,
    config.json, and the tokenizer files of model.hf_assets_path."""
    hf_interval: int = 0
    """Steps between such exports during training; 0: none. Training waits while weights are copied to
    host memory in export_dtype (and for an earlier export that is not done); rank 0 gathers and
    writes them in the background. None is ever deleted, but one of a step that is trained again, after
    load_step, is replaced."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in a last save with last_save_model_only, and in Hugging Face folders."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """`async` copies to host memory, then writes while training goes on. Costs that host memory."""
    keep_latest_k: int = 10
    """Older step folders are deleted. 0: keep all. 1 is refused: while the only one is replaced, a
    crash would leave none."""
    load_step: int = -1
    """Continue from this step instead of the newest (-1). Newer ones that the run saves again are replaced,
    and so are exports that it makes again; others stay."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to load, e.g. `optimizer,lr_scheduler,dataloader`."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to learn early whether saving works."""
    load_only: bool = False
    """Load, but never save."""


@dataclass
class Comm:
    """Time limits of collectives."""

    init_timeout_seconds: int = 300
    """Limit until step 1 is done: start-up, loading and compiling may keep ranks waiting. That step has
    long attention kernels, too: raise both limits where a layer of it takes minutes."""
    train_timeout_seconds: int = 1800
    """Limit after step 1. TorchTitan's 100 would end a healthy job here: a collective waits for the
    attention kernels queued before it, at millions of tokens for minutes. Lower it to notice a
    hanging rank sooner."""
    trace_buf_size: int = 20000
    """Entries of the NCCL flight recorder, which tells after a timeout who waited for whom; 0 is
    off."""


@dataclass
class PlanMachine:
    """A machine of your own, or figures of yours in place of the table's: what is left out is as
    plan.hardware has it. Under `plan.hardware = "custom"` all have to be given."""

    memory_gib: float | None = None
    """Memory of a GPU as torch reports it."""
    host_memory_gib: float | None = None
    """Memory of a node."""
    peak_tflops: float | None = None
    """Dense bf16 peak of a GPU, what MFU is measured against."""
    matrix_tflops: float | None = None
    """What a large bf16 matrix product reaches."""
    attention_forward_tflops: float | None = None
    """What the attention kernel reaches forward, causal work counted only."""
    attention_backward_tflops: float | None = None
    """The same backward."""
    memory_gbs: float | None = None
    """GB/s of the GPU's memory."""
    link_gbs: float | None = None
    """GB/s that a GPU sends to the others of its node in an all-to-all."""
    network_gbs: float | None = None
    """GB/s that a GPU sends to other nodes."""
    pcie_gbs: float | None = None
    """GB/s between a GPU and its host, all GPUs copying one way at once."""


@dataclass
class Plan:
    """Memory and time of a job before it runs, on a machine without a GPU (docs/planning.md). `--plan`
    is short for `--plan.enable`. Nothing here changes a training run."""

    enable: bool = False
    """Print what the job would hold and how long it would take, and end: exit code 0 if it fits, 3 if
    not, 2 for a mistake in the config."""
    hardware: Literal[
        "h100_80gb", "h200_141gb", "a100_80gb", "b200_192gb", "b300_288gb", "cpu", "custom"
    ] = "h100_80gb"
    """The machine to plan for; `custom`: all figures come from [plan.machine]."""
    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: int = 8
    """GPUs of each; with nodes it replaces what NGPU and NNODES say when a job starts."""
    search: bool = False
    """Find the fastest configuration for training.seq_len and the longest row that fits, with its
    fastest one, and write both as TOML to dump_folder (plan_fastest.toml, plan_longest.toml). Strategy,
    Ulysses x ring, heads per stage, checkpointing, offload and tiles are chosen anew; ranks that share a
    row are as in the config, or all where it says 1. Exit code 3 if nothing fits. Takes half a minute."""
    ladder: str = ""
    """Draw a picture to this file (matplotlib; .png, .pdf, .svg), and its data to the same name with .json:
    memory at training.seq_len with one measure after another, and memory against length by strategy."""
    machine: PlanMachine = field(default_factory=PlanMachine)
    """Figures of your own: section [plan.machine]."""


@dataclass
class DryRun:
    """Two steps of the job by one process, its peers replaced by nothing, measured against the plan
    (docs/dry-run.md). `--dry_run` is short for `--dry_run.enable`. The cluster is that of [plan]. Nothing
    here changes a training run."""

    enable: bool = False
    """Run as rank 0 of plan.nodes x plan.gpus_per_node ranks on this machine's GPU, or on its CPU, print
    what was measured beside what was planned, write it to dump_folder/dry_run.json, and end: exit code
    0 if the job fits, 3 if not, 2 for a mistake in the config. Loads and saves no checkpoint."""
    steps: int = 2
    """Optimizer steps. Peaks are those of the last one, which has all of the optimizer's state: at
    least 2. Of the first only the update runs on a CPU and under `kernel = "stand_in"`."""
    kernel: Literal["job", "stand_in"] = "job"
    """`job`: the attention kernel of the job; `stand_in`: one that allocates what flash kernels do and
    computes nothing, for rows whose step takes hours."""
    share_host_buffers: bool = True
    """With activation_offload: layers share one host buffer per size, so that a machine with less host
    memory than the job's will do; what the job would need is counted all the same. false: each buffer
    is allocated and page-locked. No effect without a GPU."""
    memory_limit_gib: float | Literal["auto"] = "auto"
    """Memory of the GPU that is stood for, in GiB as torch reports it: the allocator gets that less what
    CUDA and NCCL take beside it (planned). `auto`: that of plan.hardware, or of this GPU where that is
    less."""


@dataclass
class Experimental:
    """Ways in for other people's code."""

    custom_import: str = ""
    """A Python module to import before the model is looked up: it may register models."""


@dataclass
class Debug:
    """Reproducing a run."""

    seed: int = 0
    """Seed of the initial weights and of everything random, the same on any number of ranks."""
    share_offload_buffers: bool = False
    """For measuring only, with activation_offload: all layers share one host buffer per size, so that
    a rank's GPU memory can be measured on a machine with less host memory than the job's. The
    gradients are wrong."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time; an operation that has none raises. Slower
    on CUDA."""


@dataclass
class JobConfig:
    """All settings of a run. Precedence: command line, then TOML file, then the defaults here."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    attention: Attention = field(default_factory=Attention)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)
    tiling: Tiling = field(default_factory=Tiling)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    comm: Comm = field(default_factory=Comm)
    plan: Plan = field(default_factory=Plan)
    dry_run: DryRun = field(default_factory=DryRun)
    experimental: Experimental = field(default_factory=Experimental)
    debug: Debug = field(default_factory=Debug)

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
    """Overrides of the flavor's rotary embedding, for extending its context. A key left out keeps
    the flavor's own value."""

    theta: float | None = None
    """Base of the rotation frequencies (rope_theta): larger turns slower and reaches further."""
    type: Literal["default", "llama3"] | None = None
    """How frequencies are scaled: `default` not at all; `llama3` slows the low ones by `factor`."""
    factor: float | None = None
    """llama3 scaling: how many times slower the low frequencies turn, at least 1."""
    low_freq_factor: float | None = None
    """llama3 scaling: wavelengths above original_max_position_embeddings / this are slowed by the
    whole factor."""
    high_freq_factor: float | None = None
    """llama3 scaling: wavelengths below original_max_position_embeddings / this are left alone; in
    between, the two are blended. Must exceed low_freq_factor."""
    original_max_position_embeddings: int | None = None
    """llama3 scaling: the context, in tokens, for which the model was first trained."""


@dataclass
class Model:
    """Which network, of which size, and its tokenizer."""

    name: str = "llama3"
    """A registered model. `experimental.custom_import` can register more."""
    flavor: str = "debugmodel"
    """A size that the model offers, e.g. debugmodel, 8B, 70B."""
    hf_assets_path: str = ""
    """Folder with the tokenizer files (tokenizer.json, or a tiktoken *.model)."""
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
    large as the parameters; `for-loop` is slow and leanest. `auto`: fused on CUDA, else foreach."""


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
    hold_normed_input: bool = False
    """Keep the normalised input of attention from its first projection to its last, instead of making
    it again by tiles for each (stages + arrivals of KV heads times): one more hidden-state-sized
    buffer in attention's forward and backward, fewer norms. Same numbers."""
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
    selective_layers: int = -1
    """Under `selective`, how many layers keep attention's output; the others run as under `full`. Each
    costs one hidden-state-sized buffer and saves one run of its attention. It is the last layers
    that keep: backward comes to them first. -1: all."""


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
class Checkpoint:
    """Saving the run, and continuing it by the same command."""

    enable: bool = False
    """Save, and at start continue from the newest complete step in the folder, if there is one."""
    folder: str = "checkpoint"
    """Folder of the step-N folders, under dump_folder."""
    interval: int = 500
    """Steps between saves. The last step is always saved."""
    initial_load_path: str | None = None
    """A step folder to start from when the job's own folder holds no checkpoint; ignored, and said,
    when it does."""
    initial_load_model_only: bool = True
    """From initial_load_path take the weights only; otherwise step, optimizer and data too."""
    last_save_model_only: bool = False
    """The last save holds weights only, and so cannot be continued from."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in the last save. Only with last_save_model_only."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """`async` copies to host memory, then writes while training goes on. Costs that host memory."""
    keep_latest_k: int = 10
    """Older step folders are deleted. 0: keep all. 1 is refused: while the only one is replaced, a
    crash would leave none."""
    load_step: int = -1
    """Continue from this step instead of the newest (-1)."""
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
    """Limit until step 1 is done: start-up, loading and compiling may keep ranks waiting."""
    train_timeout_seconds: int = 1800
    """Limit after step 1. TorchTitan's 100 would end a healthy job here: a collective waits for the
    attention kernels queued before it, at millions of tokens for minutes. Lower it to notice a
    hanging rank sooner."""
    trace_buf_size: int = 20000
    """Entries of the NCCL flight recorder, which tells after a timeout who waited for whom; 0 is
    off."""


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
    tiling: Tiling = field(default_factory=Tiling)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    comm: Comm = field(default_factory=Comm)
    experimental: Experimental = field(default_factory=Experimental)
    debug: Debug = field(default_factory=Debug)

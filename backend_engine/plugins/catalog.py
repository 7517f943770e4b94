"""The registries of the package, with the built-in entries by lazy name.

Imported by whoever looks an implementation up; imports none of them.
"""

from typing import Any

from backend_engine.plugins.registrations import Targets
from backend_engine.plugins.registry import Held, Registry

ARCHITECTURES: Registry[Any] = Registry(
    "architecture",
    {
        "DeepseekV2ForCausalLM": "backend_engine.models.families.deepseek_v2:FAMILY",
        "DeepseekV3ForCausalLM": "backend_engine.models.families.deepseek_v3:FAMILY",
        "Gemma2ForCausalLM": "backend_engine.models.families.gemma2:FAMILY",
        "Gemma3ForCausalLM": "backend_engine.models.families.gemma3:FAMILY",
        "Gemma3ForConditionalGeneration": "backend_engine.models.families.gemma3:WITH_VISION",
        "GemmaForCausalLM": "backend_engine.models.families.gemma:FAMILY",
        "GPT2LMHeadModel": "backend_engine.models.families.gpt2:FAMILY",
        "GptOssForCausalLM": "backend_engine.models.families.gpt_oss:FAMILY",
        "GPTNeoXForCausalLM": "backend_engine.models.families.gpt_neox:FAMILY",
        "GraniteForCausalLM": "backend_engine.models.families.granite:FAMILY",
        "GraniteMoeHybridForCausalLM": "backend_engine.models.families.granite_hybrid:FAMILY",
        "LlamaForCausalLM": "backend_engine.models.families.llama:FAMILY",
        "Mamba2ForCausalLM": "backend_engine.models.families.mamba2:FAMILY",
        "MiniMaxM2ForCausalLM": "backend_engine.models.families.minimax_m2:FAMILY",
        "MistralForCausalLM": "backend_engine.models.families.mistral:FAMILY",
        "MixtralForCausalLM": "backend_engine.models.families.mixtral:FAMILY",
        "Olmo2ForCausalLM": "backend_engine.models.families.olmo2:FAMILY",
        "Phi3ForCausalLM": "backend_engine.models.families.phi3:FAMILY",
        "Qwen2ForCausalLM": "backend_engine.models.families.qwen2:FAMILY",
        "Qwen2MoeForCausalLM": "backend_engine.models.families.qwen2_moe:FAMILY",
        "Qwen3ForCausalLM": "backend_engine.models.families.qwen3:FAMILY",
        "Qwen3MoeForCausalLM": "backend_engine.models.families.qwen3_moe:FAMILY",
    },
    Held("a Family", "backend_engine.models.family:Family", instances=True),
)
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend",
    {
        "native": "backend_engine.attention.native_attention:NativeAttention",
        "torch": "backend_engine.attention.torch_attention:TorchAttention",
    },
    Held("a subclass of AttentionBackend", "backend_engine.attention.interface:AttentionBackend"),
)
CAPACITY_POLICIES: Registry[Any] = Registry(
    "capacity policy",
    {
        "guaranteed_no_evict": "backend_engine.scheduler.capacity_scheduler:GuaranteedNoEvict",
        "max_utilization": "backend_engine.scheduler.capacity_scheduler:MaxUtilization",
        "static_batch": "backend_engine.scheduler.capacity_scheduler:StaticBatch",
    },
)
# Each opens a path as a ``Checkpoint``.
CHECKPOINT_FORMATS: Registry[Any] = Registry(
    "checkpoint format",
    {
        "engine": "backend_engine.checkpoint.engine_folder:open_engine",
        "gguf": "backend_engine.checkpoint.gguf_checkpoint:open_gguf",
        "hugging_face": "backend_engine.checkpoint.hf_folder:open_hf_folder",
        "megatron": "backend_engine.checkpoint.megatron_checkpoint:open_megatron",
        "nemo": "backend_engine.checkpoint.nemo_checkpoint:open_nemo",
    },
)
# Each tells by names alone whether a folder is of its format.
CHECKPOINT_SIGNS: Registry[Any] = Registry(
    "checkpoint format",
    {
        "megatron": "backend_engine.checkpoint.megatron_checkpoint:looks_like_megatron",
        "nemo": "backend_engine.checkpoint.nemo_checkpoint:looks_like_nemo",
    },
)
CONTEXT_CHUNKING_POLICIES: Registry[Any] = Registry(
    "context chunking policy",
    {
        "equal_progress": "backend_engine.scheduler.context_chunking:EqualProgress",
        "first_come_first_served": "backend_engine.scheduler.context_chunking:FirstComeFirstServed",
    },
)
# What requests may ask for by name; there are none but those of plugins.
LOGITS_PROCESSORS: Registry[Any] = Registry(
    "logits processor",
    {},
    Held("a subclass of CustomLogitsProcessor", "backend_engine.decoder.custom_processors:CustomLogitsProcessor"),
)
MODEL_BACKENDS: Registry[Any] = Registry(
    "model backend",
    {
        "native": "backend_engine.model_engine.native_backend:NativeBackend",
        "transformers": "backend_engine.model_engine.transformers_backend:TransformersBackend",
    },
)
# Each is made without arguments and handed to layers and attention backends.
OPERATORS: Registry[Any] = Registry(
    "operators",
    {
        "native": "backend_engine.ops.native_ops:NativeOps",
        "torch": "backend_engine.ops.torch_ops:TorchOps",
    },
    Held("a subclass of TorchOps", "backend_engine.ops.torch_ops:TorchOps"),
)
# By ``quant_method`` of a checkpoint's quantization config; each reads it (``weight_format.Quantization``).
QUANT_METHODS: Registry[Any] = Registry(
    "quantization method",
    {
        "awq": "backend_engine.quantization.formats.awq:read",
        "bitsandbytes": "backend_engine.quantization.formats.bitsandbytes:read",
        "compressed-tensors": "backend_engine.quantization.formats.compressed_tensors:read",
        "fbgemm_fp8": "backend_engine.quantization.formats.fp8:read_fbgemm",
        "fp8": "backend_engine.quantization.formats.fp8:read",
        "gguf": "backend_engine.quantization.formats.gguf:read",
        "gptq": "backend_engine.quantization.formats.gptq:read",
        "modelopt": "backend_engine.quantization.formats.modelopt:read",
        "mxfp4": "backend_engine.quantization.formats.mxfp4:read",
    },
    Held("a function (config, stored) -> Quantization"),
)
# By the ending of a file's name; each reads its tensors (``tensor_reader.TensorReader``).
TENSOR_READERS: Registry[Any] = Registry(
    "kind of weight file",
    {
        ".bin": "backend_engine.checkpoint.torch_file:TorchFileReader",
        ".safetensors": "backend_engine.checkpoint.safetensors_reader:SafetensorsReader",
    },
)
WAITING_QUEUES: Registry[Any] = Registry(
    "waiting queue policy",
    {
        "fcfs": "backend_engine.scheduler.waiting_queue:FcfsQueue",
        "priority": "backend_engine.scheduler.keyed_queue:priority_queue",
        "shortest_first": "backend_engine.scheduler.keyed_queue:shortest_first_queue",
    },
)
PLUGIN_TARGETS = Targets(
    architectures=ARCHITECTURES,
    attention_backends=ATTENTION_BACKENDS,
    quantization_methods=QUANT_METHODS,
    logits_processors=LOGITS_PROCESSORS,
    operators=OPERATORS,
)

"""Fill lines as set-ups of several generations have them, on our templates: each gives a config that parses."""

import shutil
from pathlib import Path

import pytest
from fill_template import main
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from backend_engine.triton_io import parameters

TEMPLATES = Path(__file__).parents[2] / "templates"
ENGINE = (
    "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:False,max_beam_width:1,engine_dir:/m,"
    "max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,kv_cache_free_gpu_mem_fraction:0.5,"
    "exclude_input_in_output:True,enable_kv_cache_reuse:False,batching_strategy:inflight_fused_batching,"
    "max_queue_delay_microseconds:0,batch_scheduler_policy:max_utilization,encoder_input_features_data_type:TYPE_FP16,"
    "logits_datatype:TYPE_FP32"
)
LINES = [
    ("preprocessing", "tokenizer_dir:/m,tokenizer_type:auto,triton_max_batch_size:64,preprocessing_instance_count:1"),
    ("preprocessing", "tokenizer_dir:/m,triton_max_batch_size:64,preprocessing_instance_count:5,add_special_tokens:F"),
    ("postprocessing", "tokenizer_dir:/m,tokenizer_type:auto,triton_max_batch_size:64,postprocessing_instance_count:1"),
    ("tensorrt_llm", ENGINE),
    ("tensorrt_llm", ENGINE + ",prompt_embedding_table_data_type:TYPE_FP16,lookahead_window_size:,max_queue_size:6"),
    ("tensorrt_llm", ENGINE.replace("inflight_fused_batching", "V1") + ",enable_trt_overlap:0,gpu_device_ids:0\\,1"),
    ("tensorrt_llm_bls", "triton_max_batch_size:64,decoupled_mode:True,bls_instance_count:1,accumulate_tokens:False,"
     "logits_datatype:TYPE_FP16,prompt_embedding_table_data_type:TYPE_FP16"),
    ("tensorrt_llm_bls", "triton_max_batch_size:4,decoupled_mode:true,bls_instance_count:4,logits_datatype:TYPE_FP32"),
    ("ensemble", "triton_max_batch_size:64,logits_datatype:TYPE_FP32"),
    ("ensemble", "triton_max_batch_size:64,logits_datatype:TYPE_FP32,prompt_embedding_table_data_type:TYPE_BF16"),
]  # fmt: skip
READERS = {
    "preprocessing": parameters.read_preprocessing,
    "postprocessing": parameters.read_postprocessing,
    "tensorrt_llm": parameters.read_engine,
    "tensorrt_llm_bls": parameters.read_bls,
}


@pytest.mark.parametrize(("model", "line"), LINES)
def test_a_fill_line_gives_a_config_whose_parameters_load(tmp_path: Path, model: str, line: str) -> None:
    path = tmp_path / "config.pbtxt"
    shutil.copy(TEMPLATES / model / "config.pbtxt", path)
    main(str(path), line, True)
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    assert config.max_batch_size == (4 if "size:4," in line else 64)
    values = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    if model in READERS:
        READERS[model]({"parameters": values, "instance_group": [{"count": 1}]})

"""The options of vLLM (`vllm serve`), SGLang (`launch_server`) and llama.cpp (`llama-server`), and what they are here.

An unknown option that is in this table gets a hint, on the command line, in the environment and in the configuration
file. Options of the same name and meaning are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerFlag:
    names: str  # of any of the three, separated by spaces: with underscores, and short ones with their dash
    option: str = ""  # ours; "": there is none, and `note` says why
    note: str = ""  # what differs, or what to do instead


PEER_FLAGS = (
    # The model
    PeerFlag("model_path model_tag", "model"),
    PeerFlag("-m hf_repo -hf -hfr", "model", "a .gguf file on the hub is org/repository/file.gguf"),
    PeerFlag("hf_file -hff", "model", "give it with the repository, as org/repository/file.gguf"),
    PeerFlag("model_url -mu docker_repo -dr", "model", "download the file and give its path"),
    PeerFlag("load_format", "load", "the format of files is recognized; `dummy` is --load random with --shape"),
    PeerFlag("revision code_revision tokenizer_revision", "model", "download that revision and give its folder"),
    PeerFlag("download_dir", "", "the hub's files are in $HF_HOME, all others in $PACELINE_HOME"),
    PeerFlag("hf_token -hft", "", "set HF_TOKEN in the environment"),
    PeerFlag("trust_remote_code", "", "no code of a model is ever run; leave it out"),
    PeerFlag(
        "tokenizer tokenizer_path tokenizer_mode skip_tokenizer_init hf_config_path config_format model_impl",
        "",
        "the tokenizer and the configuration are those in the model's folder; leave it out",
    ),
    PeerFlag(
        "hf_overrides json_model_override_args override_kv rope_scaling rope_theta rope_scale rope_freq_base "
        "rope_freq_scale yarn_orig_ctx",
        "",
        "nothing of a model's configuration is overridden: edit config.json in a copy of its folder",
    ),
    PeerFlag(
        "chat_template_content_format",
        "",
        "whether the template joins the parts of a message itself is found out; leave it out",
    ),
    PeerFlag(
        "chat_template chat_template_file hf_chat_template_name",
        "",
        "the template is that of the model: edit chat_template.jinja in a copy of its folder",
    ),
    PeerFlag(
        "task runner convert is_embedding embedding embeddings rerank reranking",
        "",
        "every model serves chats, completions, embeddings and rerank; leave it out",
    ),
    PeerFlag(
        "limit_mm_per_prompt mm_processor_kwargs mm_attention_backend enable_multimodal mmproj -mm mmproj_url "
        "no_mmproj allowed_local_media_path language_model_only",
        "",
        "models read text alone; leave it out",
    ),
    PeerFlag(
        "generation_config override_generation_config sampling_defaults preferred_sampling_params temp temperature "
        "top_k top_p min_p repeat_penalty presence_penalty frequency_penalty repeat_last_n seed random_seed "
        "-s n_predict -n predict ignore_eos logit_bias grammar grammar_file json_schema -j pooling samplers",
        "",
        "it is a parameter of each request, with a fixed default (docs/parameters.md)",
    ),
    PeerFlag("max_logprobs", "", "a request can have up to 20 logprobs for each token"),
    # Devices and parallelism
    PeerFlag("tensor_parallel_size -tp", "tp"),
    PeerFlag("tp_size", "tp"),
    PeerFlag("tensor_split -ts split_mode -sm", "tp", "the parts are equal"),
    PeerFlag("pipeline_parallel_size -pp", "pp"),
    PeerFlag("pp_size", "pp"),
    PeerFlag("data_parallel_size -dp data_parallel_size_local", "replicas"),
    PeerFlag("dp_size dp", "replicas"),
    PeerFlag("load_balance_method", "router"),
    PeerFlag(
        "enable_expert_parallel -ep expert_parallel_size ep_size ep enable_eplb enable_dp_attention moe_a2a_backend",
        "tp",
        "which divides every expert, so that all ranks have the same work",
    ),
    PeerFlag(
        "decode_context_parallel_size prefill_context_parallel_size attention_context_parallel_size attn_cp_size",
        "",
        "a context is not divided between devices; leave it out",
    ),
    PeerFlag(
        "distributed_executor_backend nnodes node_rank dist_init_addr nccl_init_addr nccl_port master_addr master_port "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend rpc",
        "",
        "an engine runs on one machine; docs/scaling.md says how several serve together",
    ),
    PeerFlag("disable_custom_all_reduce enable_mscclpp enable_symm_mem", "collectives"),
    PeerFlag(
        "base_gpu_id gpu_id_step main_gpu -mg -dev",
        "device",
        "CUDA_VISIBLE_DEVICES chooses among several GPUs",
    ),
    PeerFlag(
        "n_gpu_layers gpu_layers -ngl cpu_moe -cmoe n_cpu_moe -ncmoe override_tensor -ot",
        "device",
        "a model is on one kind of device as a whole",
    ),
    PeerFlag("-ngld gpu_layers_draft n_gpu_layers_draft", "", "the draft model is on the device of the model"),
    PeerFlag(
        "cpu_offload_gb offload_backend",
        "quantization",
        "weights are not offloaded; fewer bits save memory",
    ),
    PeerFlag("-t threads_batch -tb", "threads"),
    PeerFlag("poll poll_batch", "", "how threads wait is not an option; leave it out"),
    PeerFlag("mlock no_mmap mmap load_mode -lm numa no_kv_offload -nkvo", "", "memory is managed; leave it out"),
    PeerFlag(
        "attention_backend prefill_attention_backend decode_attention_backend sampling_backend fp8_gemm_backend "
        "fp4_gemm_backend moe_runner_backend moe_backend lora_backend flash_attn -fa enable_flashinfer_autotune "
        "disable_flashinfer_autotune kernel_config triton_attention_num_kv_splits",
        "",
        "kernels are chosen by device and model; leave it out",
    ),
    PeerFlag(
        "enforce_eager disable_cuda_graph compilation_config -cc -O cudagraph_capture_sizes max_cudagraph_capture_size "
        "max_seq_len_to_capture cuda_graph_max_bs cuda_graph_bs enable_torch_compile torch_compile_max_bs "
        "cuda_graph_sizes",
        "",
        "CUDA graphs are captured for what --max-running and --max-batch-tokens need, and nothing else is compiled at "
        "run time; leave it out",
    ),
    # Memory
    PeerFlag("max_model_len", "context_tokens"),
    PeerFlag("context_length", "context_tokens"),
    PeerFlag("ctx_size -c", "context_tokens", "of one request; --kv-tokens is the memory of all together"),
    PeerFlag(
        "gpu_memory_utilization",
        "kv_memory_fraction",
        "of the memory that is free after loading, not of all memory",
    ),
    PeerFlag(
        "mem_fraction_static",
        "kv_memory_fraction",
        "of the memory that is free after loading, not of all memory",
    ),
    PeerFlag("num_gpu_blocks_override", "num_pages"),
    PeerFlag("kv_cache_memory_bytes kv_cache_memory", "kv_tokens", "in tokens, not in bytes"),
    PeerFlag("max_total_tokens", "kv_tokens"),
    PeerFlag("block_size", "page_size"),
    PeerFlag("enable_prefix_caching", "prefix_cache", "it is on by default"),
    PeerFlag("disable_radix_cache", "prefix_cache", "--no-prefix-cache"),
    PeerFlag("cache_prompt", "prefix_cache", "it is on by default"),
    PeerFlag("cache_reuse", "", "KV is reused for equal prefixes alone; leave it out"),
    PeerFlag("context_shift", "", "a context is never shifted: a request ends at its limit"),
    PeerFlag("radix_eviction_policy", "eviction"),
    PeerFlag("kv_offloading_size kv_offloading_backend swap_space", "host_kv_tokens", "in tokens"),
    PeerFlag("enable_hierarchical_cache hicache_ratio hicache_size", "host_kv_tokens", "in tokens"),
    PeerFlag("cache_ram -cram", "host_kv_tokens", "in tokens"),
    PeerFlag("hicache_write_policy", "", "a page is copied to host memory when it is evicted; leave it out"),
    PeerFlag("hicache_storage_backend slot_save_path", "", "KV is kept in device and host memory, not in files"),
    PeerFlag("kv_unified", "", "all requests always share one pool of pages; leave it out"),
    PeerFlag("swa_full", "", "the KV of whole prefixes is always kept; leave it out"),
    PeerFlag("kv_cache_dtype", "kv_dtype", "fp8 is fp8_e4m3"),
    PeerFlag("cache_type_k -ctk cache_type_v -ctv", "kv_dtype"),
    PeerFlag("calculate_kv_scales", "kv_dtype", "scales are found by itself"),
    # Batching and order
    PeerFlag("max_num_seqs", "max_running"),
    PeerFlag("max_running_requests", "max_running"),
    PeerFlag("parallel -np", "max_running"),
    PeerFlag("max_num_batched_tokens", "max_batch_tokens"),
    PeerFlag("batch_size -b ubatch_size -ub", "max_batch_tokens"),
    PeerFlag("chunked_prefill_size", "chunk_tokens"),
    PeerFlag("long_prefill_token_threshold", "chunk_tokens"),
    PeerFlag("enable_chunked_prefill", "batching", "prompts are always computed in chunks"),
    PeerFlag("enable_mixed_chunk", "batching", "mixed is the default"),
    PeerFlag("cont_batching -cb no_cont_batching -nocb", "batching", "it is always continuous, unless static"),
    PeerFlag("scheduling_policy", "policy"),
    PeerFlag("schedule_policy enable_priority_scheduling", "policy"),
    PeerFlag("priority_scheduling_preemption_threshold", "retract_gap"),
    PeerFlag("max_queued_requests", "max_waiting"),
    PeerFlag("schedule_conservativeness", "", "how long outputs get is learned while serving; leave it out"),
    PeerFlag(
        "async_scheduling disable_overlap_schedule num_scheduler_steps",
        "overlap",
        "it is on by default",
    ),
    PeerFlag(
        "stream_interval num_continuous_decode_steps",
        "",
        "every token is sent when it is there; leave it out",
    ),
    # Speculative decoding
    PeerFlag("speculative_config -sc", "speculate", "with --draft-model for a draft model"),
    PeerFlag("speculative_algorithm", "speculate"),
    PeerFlag("spec_type spec_default", "speculate"),
    PeerFlag(
        "speculative_model speculative_draft_model_path speculative_draft_model",
        "draft_model",
        "with --speculate draft",
    ),
    PeerFlag("model_draft -md spec_draft_model hf_repo_draft -hfd", "draft_model", "with --speculate draft"),
    PeerFlag(
        "num_speculative_tokens speculative_num_steps speculative_num_draft_tokens speculative_eagle_topk draft "
        "draft_n draft_max draft_min spec_draft_n_max spec_draft_n_min draft_p_min",
        "speculate",
        "the number of drafts follows from what they gain",
    ),
    # LoRA
    PeerFlag("enable_lora", "lora", "or --lora-folder, to load adapters over HTTP"),
    PeerFlag("lora_modules", "lora"),
    PeerFlag("lora_paths", "lora"),
    PeerFlag("lora_scaled", "lora", "the scale is that of the adapter"),
    PeerFlag("max_loras_per_batch", "max_loras"),
    PeerFlag("max_cpu_loras max_loaded_loras", "max_loras", "any number waits in host memory"),
    PeerFlag("lora_target_modules lora_dtype fully_sharded_loras", "lora", "it follows from the adapters"),
    # Server
    PeerFlag("served_model_name", "served_name"),
    PeerFlag("alias -a", "served_name"),
    PeerFlag("api_key api_key_file", "config", "keys are in its [[tenants]] tables (docs/serving.md)"),
    PeerFlag("admin_api_key", "admin_key"),
    PeerFlag("allowed_origins", "cors_origins"),
    PeerFlag(
        "allow_credentials allowed_methods allowed_headers cors_methods cors_headers cors_credentials",
        "cors_origins",
        "methods and headers follow from the routes",
    ),
    PeerFlag("api_server_count -asc", "workers"),
    PeerFlag("tokenizer_worker_num", "workers"),
    PeerFlag("threads_http", "workers"),
    PeerFlag(
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_key_file ssl_cert_file",
        "",
        "TLS ends in a proxy in front of the server",
    ),
    PeerFlag("root_path fastapi_root_path api_prefix", "", "a proxy in front of the server removes the prefix"),
    PeerFlag("ui no_ui webui no_webui path", "live_page"),
    PeerFlag("timeout -to", "slow_reader_s", "with --body-s and --header-s for requests"),
    PeerFlag("h11_max_incomplete_event_size", "max_header_bytes"),
    PeerFlag("h11_max_header_count", "max_headers"),
    PeerFlag("watchdog_timeout", "watchdog_s"),
    PeerFlag("uds", "", "the server listens on --host and --port; a proxy can offer a Unix socket"),
    PeerFlag("disable_frontend_multiprocessing", "", "HTTP and the engine are always processes of their own"),
    PeerFlag("enable_request_id_headers", "", "every response has X-Request-Id; leave it out"),
    PeerFlag("disable_fastapi_docs", "", "/openapi.json is always served, and there is no page of it"),
    PeerFlag("allow_auto_truncate", "clip_max_tokens", "which lowers max_tokens; no prompt is ever cut off"),
    PeerFlag("color log_colors", "", "logs have no colors, and NO_COLOR removes those of a terminal; leave it out"),
    PeerFlag(
        "skip_server_warmup warmups warmup no_warmup",
        "",
        "one token is generated before the server is ready; leave it out",
    ),
    PeerFlag(
        "enable_auto_tool_choice tool_call_parser tool_parser_plugin tool_server jinja no_jinja",
        "",
        "the format of tool calls follows from the chat template; leave it out",
    ),
    PeerFlag(
        "reasoning_parser enable_reasoning",
        "separate_reasoning",
        "the markers follow from the chat template",
    ),
    PeerFlag("reasoning_format", "separate_reasoning"),
    PeerFlag("reasoning -rea reasoning_effort chat_template_kwargs", "", "it is a parameter of each request"),
    PeerFlag("default_chat_template_kwargs", "", "it is a parameter of each request: chat_template_kwargs"),
    PeerFlag("reasoning_budget", "", "reasoning has no limit of its own: max_tokens bounds it with the answer"),
    PeerFlag(
        "guided_decoding_backend structured_outputs_config grammar_backend",
        "",
        "grammars are compiled by llguidance, which needs no option; leave it out",
    ),
    PeerFlag("file_storage_path", "batch_folder"),
    PeerFlag("disaggregation_mode kv_transfer_config", "role"),
    PeerFlag("disaggregation_transfer_backend", "kv_transport"),
    PeerFlag("disaggregation_bootstrap_port", "kv_listen", "an address with the port"),
    PeerFlag("kv_events_config", "kv_events"),
    # Logs
    PeerFlag("uvicorn_log_level log_level_http", "log_level"),
    PeerFlag("verbose -v verbosity -lv log_verbosity log_verbose", "log_level"),
    PeerFlag(
        "enable_log_requests disable_log_requests log_requests log_requests_level disable_uvicorn_access_log",
        "log_level",
        "each request is one line of level info; --log-prompts adds its text",
    ),
    PeerFlag("log_requests_format log_jsonl", "log_format"),
    PeerFlag("log_file log_disable", "log_level", "logs go to standard error"),
    PeerFlag(
        "enable_metrics metrics disable_log_stats slots enable_server_load_tracking enable_cache_report "
        "enable_prompt_tokens_details",
        "",
        "/metrics and /v1/requests are always served, and usage has cached tokens; leave it out",
    ),
    PeerFlag(
        "otlp_traces_endpoint enable_trace collect_detailed_traces",
        "",
        "POST /admin/trace records a trace",
    ),
)
_BY_NAME = {name: flag for flag in reversed(PEER_FLAGS) for name in flag.names.split()}


def peer_hint(given: str, known: Iterable[str], show: Callable[[str], str]) -> str:
    """The end of an error about an unknown option, as it was given: what it is here. Empty if no peer has it, or if
    ours is not one of the `known` options. `show` writes one of ours."""
    flag = next((_BY_NAME[name] for name in _spellings(given) if name in _BY_NAME), None)
    if flag is None or (flag.option and flag.option not in known):
        return ""
    if not flag.option:
        return f"there is none here: {flag.note}."
    note = f" ({flag.note})" if flag.note else ""
    return f"here it is called {show(flag.option)}{note}; see its help."


def _spellings(given: str) -> Iterator[str]:
    name = given.partition("=")[0]
    if name.startswith("-") and not name.startswith("--"):
        yield name
    name = name.lstrip("-").replace("-", "_").lower()
    yield name
    yield name.removeprefix("no_")

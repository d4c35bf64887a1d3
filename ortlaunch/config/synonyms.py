"""Other tools' names for our keys: the table of synonyms behind "Did you mean …?".

The left column has our keys. The right column has the names that users of transformers' Trainer, Lightning,
Accelerate, DeepSpeed, torchtitan, torchrun and sbatch type.
"""

from __future__ import annotations

_NAMES = {
    "train.epochs": "epochs epoch num_epochs max_epochs num_train_epochs n_epochs",
    "train.steps": "num_steps n_steps iterations iters max_iters train_iters num_iterations total_steps "
    "num_training_steps training_steps",
    "train.batch_size": "bs mbs micro_batch_size per_device_train_batch_size per_device_batch_size local_batch_size "
    "train_batch_size train_micro_batch_size_per_gpu micro_batch_size_per_gpu",
    "train.grad_accumulation": "grad_accum gradient_accumulation_steps accumulate_grad_batches accumulation_steps "
    "grad_accumulation_steps accumulate_steps",
    "train.precision": "dtype mixed_precision torch_dtype amp autocast mixed_precision_param",
    "train.precision=fp16": "fp16 half float16 fp16.enabled use_fp16",
    "train.precision=bf16": "bf16 bfloat16 bf16.enabled use_bf16",
    "train.precision=fp32": "fp32 float32",
    "train.clip_grad_norm": "max_grad_norm gradient_clip_val gradient_clipping clip clipping",
    "train.log_every": "log_interval log_freq metrics.log_freq logging_steps log_steps log_every_n_steps "
    "steps_per_print print_every",
    "train.eval_every": "eval_interval val_every eval_steps val_check_interval check_val_every_n_epoch "
    "eval_every_n_steps",
    "train.eval_samples": "limit_val_batches eval_iters",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint.mode recompute recomputation "
    "grad_checkpointing",
    "train.deterministic": "full_determinism determinism use_deterministic_algorithms",
    "train.checkpoint_every": "ckpt_every checkpoint_interval checkpoint.interval save_steps save_every "
    "save_interval save_freq every_n_train_steps checkpointing_steps save_every_n_steps checkpoint_steps checkpoint",
    "train.keep_checkpoints": "save_total_limit save_top_k total_limit keep_latest_k max_checkpoints keep_last",
    "train.checkpoint_async": "async_save async_mode",
    "train.resume": "resume_from_checkpoint ckpt_path load_checkpoint resume_from",
    "train.save_weights": "save_model save_final save_weights_only",
    "adapter": "peft lora use_peft use_lora adapter_type",
    "adapter.rank": "lora_r lora_rank r adapter.r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_modules",
    "optimizer": "optimizer_type optimizer_name optim optimizer_class optimizer.type",
    "optimizer.lr": "learning_rate base_lr peak_lr init_lr initial_lr step_size optimizer.params.lr",
    "optimizer.weight_decay": "wd decay l2 regularization optimizer.params.weight_decay",
    "optimizer.beta1 optimizer.beta2": "betas adam_betas optimizer.params.betas",
    "optimizer.beta1": "adam_beta1 beta_1",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.beta2": "adam_beta2 beta_2",
    "scheduler": "lr_scheduler_type lr_scheduler lr_schedule schedule scheduler_type lr_scheduler_name scheduler.type",
    "scheduler.warmup_steps": "warmup warmup_iters lr_warmup_steps",
    "scheduler.min_ratio": "min_lr min_lr_ratio eta_min min_lr_rate lr_min final_lr end_lr",
    "data": "dataset dataset_type",
    "data.path": "data_dir dataset_path dataset_name train_file train_data data_file data_files filenames "
    "dataset.path dataset.name",
    "data.config": "dataset_config dataset_config_name",
    "data.column": "text_column text_field dataset_text_field",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.seq_len": "sequence_length seq_length max_length max_seq_length block_size context_length context_size",
    "data.workers": "num_workers dataloader_num_workers loader_workers",
    "data.eval_fraction": "val_split validation_split test_size eval_ratio val_ratio",
    "data.image_size": "resolution",
    "model": "arch architecture network model_type",
    "model.params.pretrained": "model_name_or_path pretrained_model_name_or_path pretrained hf_path model_id",
    "model.weights": "init_from pretrained_weights init_weights initial_weights state_dict",
    "model.target": "model_class model._target_ _target_",
    "run_root": "output_dir out_dir save_dir default_root_dir project_dir dump_folder work_dir logging_dir log_dir "
    "output output_path checkpoint_dir",
    "name": "run_name job_name",
    "experiment": "experiment_name project project_name wandb_project exp exp_name",
    "seed": "random_seed manual_seed seed_everything data_seed rng_seed",
    "device": "accelerator device_type",
    "device=cpu": "cpu use_cpu no_cuda",
    "device=cuda": "cuda use_cuda use_gpu",
    "backend=compile": "compile torch_compile inductor torchcompile",
    "backend=ort": "ort onnxruntime ortmodule onnx",
    "backend=eager": "eager",
    "backend.mode": "compile_mode torch_compile_mode",
    "trainer": "strategy engine distributed_type distributed parallelism",
    "trainer=ddp": "ddp",
    "trainer=deepspeed": "deepspeed",
    "trainer.config": "deepspeed_config ds_config deepspeed_config_file",
    "trainer.zero_stage": "stage zero zero_optimization zero_optimization.stage zero_level",
    "trainer.offload_optimizer": "cpu_offload offload_optimizer_device enable_cpu_offload",
    "trainer.timeout_seconds": "ddp_timeout nccl_timeout init_timeout_seconds collective_timeout",
    "trainer.bucket_cap_mb": "ddp_bucket_cap_mb bucket_size bucket_size_mb",
    "trainer.find_unused_parameters": "ddp_find_unused_parameters",
    "launcher.workers_per_node": "nproc_per_node nproc num_processes processes procs world_size ntasks "
    "ntasks_per_node tasks_per_node workers processes_per_node ranks_per_node",
    "launcher.workers_per_node launcher.gpus_per_node": "gpus num_gpus n_gpus n_gpu ngpu gpu devices num_devices "
    "gpus_per_task num_gpus_per_node devices_per_node",
    "launcher.threads": "omp_num_threads num_threads num_cpu_threads_per_process intra_op_threads cpu_threads",
    "launcher.allocator": "malloc",
    "launcher.nodes": "num_nodes nnodes num_machines machines hosts",
    "launcher.node_rank": "machine_rank",
    "launcher.master_addr": "main_process_ip rdzv_endpoint master_address master_ip master_host master",
    "launcher.master_port": "main_process_port",
    "launcher.time": "walltime time_limit wall_time timelimit time_min",
    "launcher.timeout_seconds": "timeout watchdog",
    "launcher.max_restarts": "retries max_retries",
    "launcher.partition": "queue",
    "launcher.memory": "mem mem_per_node ram",
    "launcher.cpus_per_node": "cpus_per_task cpus_per_gpu",
    "launcher.container.image": "container_image docker_image",
    "launcher.dry_run": "dryrun",
    "tracking": "report_to tracker log_with",
    "tracking.uri": "mlflow_tracking_uri tracking_server",
    "profile": "profiler profiling",
}

KEYS: dict[str, tuple[str, ...]] = {
    name: tuple(keys.split()) for keys, names in _NAMES.items() for name in names.split()
}
"""Maps another tool's name to our keys that it may mean, the likeliest first. An entry can also be ``KEY=VALUE``, if
the name implies the value, or ``GROUP``, if the user has to choose an option."""

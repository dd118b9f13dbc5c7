def model_parallel_cuda_manual_seed(seed):
    pass

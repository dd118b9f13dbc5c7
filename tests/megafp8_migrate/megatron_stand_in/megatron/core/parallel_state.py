def initialize_model_parallel(ranks):
    pass

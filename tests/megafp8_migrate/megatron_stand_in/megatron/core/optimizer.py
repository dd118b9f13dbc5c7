import torch


class Optimizer(torch.optim.SGD):
    def reload_model_params(self):
        pass

    def scale_loss(self, loss):
        return loss

    def step(self):
        super().step()
        return True, 0.0, None


def get_megatron_optimizer(config, models):
    return Optimizer(models[0].parameters(), lr=0.1)

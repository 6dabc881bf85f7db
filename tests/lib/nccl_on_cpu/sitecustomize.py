import nccl_on_cpu

nccl_on_cpu.install()

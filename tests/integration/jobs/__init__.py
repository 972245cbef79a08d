"""Training functions of the integration tests. Their workers get the device of the test run."""

from tests.support.nccl_like.settings import from_environment

if from_environment() is not None:
    from tests.support.nccl_like.install import install_from_environment

    install_from_environment()

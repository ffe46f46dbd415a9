"""The package list, which pyproject.toml cannot express: everything else is there.

`kernels/` at the repository root installs as `flashoptim_dist.kernels`, never as a top-level `kernels`: that name
belongs to another distribution, which transformers imports wherever it finds it.
"""

from setuptools import find_packages, setup

PACKAGES = find_packages(include=["flashoptim_dist", "flashoptim_dist.*"])
KERNELS = ["flashoptim_dist.kernels", *(f"flashoptim_dist.kernels.{name}" for name in find_packages("kernels"))]

setup(packages=PACKAGES + KERNELS, package_dir={"flashoptim_dist.kernels": "kernels"})

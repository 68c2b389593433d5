"""Uses of the gradient noise: noise scale, plans of batch sizes, AdaScale, Fisher, and gauges."""

from varreg.noise import gauges
from varreg.noise.adascale import AdaScale
from varreg.noise.batch_plan import Plan, PlanRow
from varreg.noise.fisher import fisher
from varreg.noise.fisher_sums import FisherSums
from varreg.noise.noise_scale import NoiseScale
from varreg.noise.reading import Reading

__all__ = [
    "AdaScale",
    "FisherSums",
    "NoiseScale",
    "Plan",
    "PlanRow",
    "Reading",
    "fisher",
    "gauges",
]

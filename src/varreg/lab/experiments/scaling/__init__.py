"""Another batch size: do the plan of the noise scale, and AdaScale, keep the base's loss?"""

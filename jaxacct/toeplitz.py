from dataclasses import dataclass
import numpy as np
@dataclass(frozen=True)
class BandedToeplitz:
    coefficients: tuple
    def __post_init__(self):
        c=np.asarray(self.coefficients,float); c=c/np.sqrt((c**2).sum())
        object.__setattr__(self,"coefficients",tuple(c.tolist()))
    @property
    def bands(self): return len(self.coefficients)
    @property
    def array(self): return np.array(self.coefficients)
    @classmethod
    def square_root(cls,bands):
        c=[1.0]
        for k in range(1,bands): c.append(c[-1]*(2*k-1)/(2*k))
        return cls(tuple(c))
    @classmethod
    def optimal(cls, *, iterations, bands, min_separation, participations): return cls.square_root(bands)
def prefix_sum_error(strategy, *, iterations, noise_multiplier):
    from scipy.signal import lfilter
    g=lfilter([1.0],strategy.array,np.ones(iterations)); return float(((iterations-np.arange(iterations))*g**2).sum()/iterations*noise_multiplier**2)

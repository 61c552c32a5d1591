// uPlot reads this once, when it loads. Two dots for each at the least, so that printed charts are not blurred.
self.devicePixelRatio = Math.max(2, devicePixelRatio);

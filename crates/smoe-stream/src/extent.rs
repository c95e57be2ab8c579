//! Where expert records lie in a file, checked once.

use crate::StreamError;

/// Strides and bases are multiples of this, so that every record can be read directly.
pub const STRIDE_UNIT_BYTES: u64 = 4096;

/// More expert layers than any published model has (the deepest have about 100).
pub const MAX_LAYERS: usize = 4096;

/// Experts of all layers together; larger published models have under 2^16.
pub const MAX_EXPERTS: u64 = 1 << 22;

/// Bytes of one record; larger published experts have under 512 MiB in F32.
pub const MAX_STRIDE_BYTES: u64 = 4 << 30;

/// One routed expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// Index into the list of expert layers (dense layers do not count).
    pub layer: u32,
    /// Expert within the layer.
    pub expert: u32,
}

/// The records of one layer: `count` records of `record_bytes` bytes, `stride` bytes apart. Whole strides are read and
/// checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerExtent {
    /// Absolute offset of the first record; a multiple of 4096.
    pub base: u64,
    /// Bytes from one record to the next; a multiple of 4096.
    pub stride: u64,
    /// Bytes of a record that mean something; at most `stride`.
    pub record_bytes: u64,
    /// Experts in the layer.
    pub count: u32,
    /// XXH3-64 (seed 0) of each record's whole stride; `count` of them.
    pub checksums: Vec<u64>,
}

impl LayerExtent {
    fn check(&self) -> Result<(), String> {
        let LayerExtent { base, stride, record_bytes, count, ref checksums } = *self;
        if stride == 0 || !stride.is_multiple_of(STRIDE_UNIT_BYTES) || stride > MAX_STRIDE_BYTES {
            return Err(format!(
                "stride is {stride}, expected a multiple of {STRIDE_UNIT_BYTES} up to {MAX_STRIDE_BYTES}"
            ));
        }
        if !base.is_multiple_of(STRIDE_UNIT_BYTES) {
            return Err(format!("base offset is {base}, expected a multiple of {STRIDE_UNIT_BYTES}"));
        }
        if record_bytes == 0 || record_bytes > stride {
            return Err(format!("record_bytes is {record_bytes}, expected 1 to the stride of {stride}"));
        }
        if count == 0 || checksums.len() as u64 != u64::from(count) {
            return Err(format!(
                "{count} experts with {} checksums, expected as many and not 0",
                checksums.len()
            ));
        }
        let end = stride.checked_mul(u64::from(count)).and_then(|bytes| base.checked_add(bytes));
        match end.is_some_and(|end| i64::try_from(end).is_ok()) {
            true => Ok(()),
            false => {
                Err(format!("{count} records of {stride} bytes from offset {base} on overflow a file offset"))
            }
        }
    }
}

/// All layers, with the experts numbered through.
pub(crate) struct ExpertMap {
    layers: Box<[LayerExtent]>,
    /// Number of the first expert of each layer.
    first: Box<[u32]>,
    experts: u32,
}

/// One record's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) offset: u64,
    pub(crate) stride: u64,
    pub(crate) checksum: u64,
}

impl ExpertMap {
    /// Checks every layer and the total.
    pub(crate) fn new(layers: Vec<LayerExtent>) -> Result<ExpertMap, StreamError> {
        let layout = |layer: usize, reason| StreamError::Layout { layer: layer as u32, reason };
        if layers.len() > MAX_LAYERS {
            return Err(layout(0, format!("{} expert layers, expected at most {MAX_LAYERS}", layers.len())));
        }
        let mut first = Vec::with_capacity(layers.len());
        let mut experts = 0_u64;
        for (index, layer) in layers.iter().enumerate() {
            layer.check().map_err(|reason| layout(index, reason))?;
            first.push(experts as u32);
            experts += u64::from(layer.count);
            if experts > MAX_EXPERTS {
                return Err(layout(
                    index,
                    format!("more than {MAX_EXPERTS} experts in all layers up to here"),
                ));
            }
        }
        Ok(ExpertMap { layers: layers.into(), first: first.into(), experts: experts as u32 })
    }

    /// Experts of all layers.
    pub(crate) fn experts(&self) -> usize {
        self.experts as usize
    }

    /// The widest stride.
    pub(crate) fn max_stride(&self) -> u64 {
        self.layers.iter().map(|layer| layer.stride).max().unwrap_or(0)
    }

    /// Number of an expert among all.
    pub(crate) fn number(&self, id: ExpertId) -> Result<u32, StreamError> {
        let layer = self.layers.get(id.layer as usize);
        let experts = layer.map_or(0, |layer| layer.count);
        match self.first.get(id.layer as usize) {
            Some(first) if id.expert < experts => Ok(first + id.expert),
            _ => Err(StreamError::UnknownExpert {
                layer: id.layer,
                expert: id.expert,
                layers: self.layers.len() as u32,
                experts,
            }),
        }
    }

    /// The expert of a number that `number` gave.
    pub(crate) fn id(&self, number: u32) -> ExpertId {
        let layer = self.first.partition_point(|&first| first <= number).saturating_sub(1);
        ExpertId { layer: layer as u32, expert: number - self.first.get(layer).copied().unwrap_or(0) }
    }

    /// Place and checksum of an expert that exists.
    pub(crate) fn record(&self, id: ExpertId) -> Record {
        let layer = &self.layers[id.layer as usize];
        Record {
            offset: layer.base + u64::from(id.expert) * layer.stride,
            stride: layer.stride,
            checksum: layer.checksums[id.expert as usize],
        }
    }

    /// Meaningful bytes of a record of that layer; 0 where there is none.
    pub(crate) fn record_bytes(&self, layer: u32) -> usize {
        self.layers.get(layer as usize).map_or(0, |layer| layer.record_bytes as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(base: u64, stride: u64, record_bytes: u64, count: u32) -> LayerExtent {
        LayerExtent { base, stride, record_bytes, count, checksums: (0..u64::from(count)).collect() }
    }

    #[test]
    fn experts_are_numbered_through() {
        let map =
            ExpertMap::new(vec![layer(4096, 4096, 10, 3), layer(16384, 8192, 8192, 1), layer(0, 4096, 1, 2)])
                .unwrap();
        assert_eq!((map.experts(), map.max_stride()), (6, 8192));
        let mut next = 0;
        for (layer, count) in [3, 1, 2].into_iter().enumerate() {
            for expert in 0..count {
                let id = ExpertId { layer: layer as u32, expert };
                assert_eq!(map.number(id).unwrap(), next);
                assert_eq!(map.id(next), id);
                next += 1;
            }
        }
        let record = map.record(ExpertId { layer: 0, expert: 2 });
        assert_eq!(record, Record { offset: 12288, stride: 4096, checksum: 2 });
        for (layer, expert) in [(0, 3), (1, 1), (3, 0), (u32::MAX, 0), (0, u32::MAX)] {
            let error = map.number(ExpertId { layer, expert }).unwrap_err();
            assert!(matches!(error, StreamError::UnknownExpert { layers: 3, .. }), "{error}");
        }
    }

    #[test]
    fn nonsense_layouts_are_named() {
        let good = layer(4096, 4096, 4096, 2);
        let bad = [
            (layer(4096, 0, 1, 2), "stride"),
            (layer(4096, 4095, 1, 2), "stride"),
            (layer(4096, MAX_STRIDE_BYTES + 4096, 1, 2), "stride"),
            (layer(4097, 4096, 1, 2), "base offset"),
            (layer(4096, 4096, 0, 2), "record_bytes"),
            (layer(4096, 4096, 4097, 2), "record_bytes"),
            (layer(4096, 4096, 1, 0), "0 experts"),
            (LayerExtent { checksums: vec![1], ..good.clone() }, "1 checksums"),
            (layer(u64::MAX - 4095, 4096, 1, 2), "overflow"),
            (layer(i64::MAX as u64 - 4095, 4096, 1, 2), "overflow"),
        ];
        for (extent, expected) in bad {
            let error = ExpertMap::new(vec![good.clone(), extent]).err().unwrap().to_string();
            assert!(error.starts_with("expert layer 1: ") && error.contains(expected), "{error}");
        }
        assert_eq!(ExpertMap::new(Vec::new()).unwrap().experts(), 0);
        assert!(ExpertMap::new(vec![good; MAX_LAYERS + 1]).is_err());
    }
}

//! Groups of tensors in device memory.

use std::ops::Range;
use std::sync::Arc;

use twinbuf_cuda::cudarc::driver::{CudaContext, CudaStream};
use twinbuf_cuda::{Element, Lease};
use twinbuf_mmap::Tensor;

use super::StreamBuilder;
use super::group::{Group, Place, check, not_whole};
use crate::error::Error;
use crate::pipe::device::Cuda;
use crate::pipe::ring::Header;

impl StreamBuilder {
    /// Copies each group to the device of `context` on a separate stream, while the previous group is in use.
    ///
    /// The host slots are page-locked. Two device slots of the same size are added by default
    /// ([`device_depth`](StreamBuilder::device_depth)); a [`memory_limit`](Self::memory_limit) counts them too. Each
    /// item is a `Group<Cuda>`: drop it as soon as the work that reads it is *enqueued*. The next copy into its slot
    /// waits for the streams that use it.
    ///
    /// Groups [kept in memory](Self::keep) stay in host memory: they are read once, and copied to the device in each
    /// pass.
    ///
    /// ```no_run
    /// use twinbuf::cuda::{self, cudarc::driver::DevicePtr};
    /// use twinbuf::stream::Tensors;
    ///
    /// let ctx = cuda::context(0)?; // or the context you have
    /// let stream = ctx.new_stream()?;
    /// let model = Tensors::open(["model.safetensors"])?;
    /// let layer = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse::<u32>().ok();
    /// let mut layers = twinbuf::stream(model.groups_by(layer)?).cycle().cuda(ctx).build()?;
    /// for _token in 0..100 {
    ///     for layer in layers.pass() {
    ///         let layer = layer?; // being copied; the next one is being read
    ///         let up = layer.tensor("mlp.up_proj.weight")?;
    ///         let (shape, up) = (up.tensor().shape(), up.on::<u16>(&stream)?); // `stream` waits for the copy
    ///         // launch kernels on `stream` that read `up`
    ///     }
    /// }
    /// # Ok::<(), twinbuf::BoxError>(())
    /// ```
    pub fn cuda(self, context: Arc<CudaContext>) -> StreamBuilder<Cuda> {
        StreamBuilder { backend: Cuda { context, device_depth: 2 }, options: self.options, own: self.own }
    }
}

impl StreamBuilder<Cuda> {
    /// Sets the number of device slots. Default: 2. With one slot, a group is copied when the one before has been dropped.
    /// `build` returns [`Error::Option`] for 0.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.backend.device_depth = slots;
        self
    }
}

impl Group<Cuda> {
    /// Returns all tensors of the group, in device memory.
    #[must_use]
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = DeviceView<'_>> {
        self.ranges().map(|(tensor, range)| DeviceView { tensor, range, group: self })
    }

    /// Returns the tensor with this name, found as in host memory ([`Group::tensor`]).
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] unless one tensor matches.
    pub fn tensor(&self, name: &str) -> Result<DeviceView<'_>, Error> {
        self.find(name).map(|(tensor, range)| DeviceView { tensor, range, group: self })
    }

    /// Returns the lease of the device slot, for example to call [`Lease::on_raw`] or [`Lease::wait_copied`].
    #[must_use]
    pub fn lease(&self) -> &Lease<Header<usize>> {
        match &self.place {
            Place::Slot(lease) => lease,
            Place::Kept(_) => unreachable!("a device has all groups in its slots"),
        }
    }
}

/// One tensor of a `Group<Cuda>`: its name, type, shape and place in device memory.
#[derive(Clone)]
pub struct DeviceView<'g> {
    tensor: &'g Tensor,
    range: Range<usize>,
    group: &'g Group<Cuda>,
}

impl<'g> DeviceView<'g> {
    /// Returns the description of the tensor: name, type and shape.
    #[must_use]
    pub const fn tensor(&self) -> &'g Tensor {
        self.tensor
    }

    /// Returns the byte range of the tensor in the [lease](Group::lease) of its group.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Returns the elements as values of type `T`, for use on `stream`. `stream` waits for the copy, and the slot's
    /// next copy waits for `stream`; see [`Lease::on`].
    ///
    /// `T` must be as for [`View::cast`](super::View::cast).
    ///
    /// # Errors
    ///
    /// - [`Error::Tensor`]: `T` does not match the element type, the size is not a multiple of the size of `T`, or the bytes
    ///   are not aligned for `T`.
    /// - [`Error::Device`]: the other errors of [`Lease::on`].
    pub fn on<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<twinbuf_cuda::View<'g, T>, Error> {
        let at = &self.group.at;
        check::<T>(self.tensor, at)?;
        self.group.lease().on_range(self.range(), stream).map_err(|error| match error {
            twinbuf_cuda::Error::Option { .. } => not_whole::<T>(self.tensor, at),
            error => Error::Device(error.into()),
        })
    }
}

debug!([] DeviceView['_], |view| tensor: view.tensor);

//! One cudarc for all: a context that candle or burn made is a context for the loader.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use twinbuf::loader::{Cuda, LoaderBuilder};

pub fn upload(builder: LoaderBuilder, context: Arc<CudaContext>) -> LoaderBuilder<Cuda> {
    builder.cuda(context)
}
